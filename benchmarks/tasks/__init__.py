"""Whole tasks as users run them, each compared with the best package that can do it, to the same quality."""

from benchmarks.tasks.study import STUDY as STUDY
