"""moereg inside other projects' models and engines, one module per project."""
