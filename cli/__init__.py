"""The `epd` command."""
