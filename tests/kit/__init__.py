"""The conformance kit and the tests of tests."""
