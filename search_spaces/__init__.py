"""What a sweep may vary."""
