"""Model families: checkpoints, prompts, pictures, packed forwards, pooling."""
