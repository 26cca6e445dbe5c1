"""Whole models, of images and of language: the rows that are measured, their peers, their gates."""
