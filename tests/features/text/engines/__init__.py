"""Tests of text engines other than ours."""
