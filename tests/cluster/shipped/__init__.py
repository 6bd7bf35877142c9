"""Tests that share one server of the shipped configuration."""
