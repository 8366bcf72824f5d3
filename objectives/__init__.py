"""How a checkpoint is judged: label-inferred quality, harm per family, the release rule."""
