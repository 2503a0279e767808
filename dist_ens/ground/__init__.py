"""Errors, types, numbers, paths and files, on which every other room stands."""
