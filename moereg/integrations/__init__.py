"""moereg inside other projects' models and engines, one module for each project."""
