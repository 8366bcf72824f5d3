"""Built-in reward wrappers that need fitted labels."""
