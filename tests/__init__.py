"""Tests. The folders mirror the package; a package of its own so that no other distribution's ``tests`` is found."""
