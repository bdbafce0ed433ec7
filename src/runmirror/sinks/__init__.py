"""Sinks: what brings rows and files into a tracker. Importing this package imports no tracker."""
