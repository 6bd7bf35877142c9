"""EPD: multimodal embedding models served in two stages that scale apart."""

__version__ = "0.1.0"
