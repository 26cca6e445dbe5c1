"""Registers the profiles before the tests of this folder are collected."""

from tests.fuzz import profiles

__all__ = ["profiles"]
