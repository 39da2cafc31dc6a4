"""Support for the tests."""
