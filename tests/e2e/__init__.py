"""Tests of the whole house: a real server process, and the clients that people use."""
