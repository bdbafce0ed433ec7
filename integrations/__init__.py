"""Separately installable packages, each in a folder of its own; a package only so that their tests can share."""
