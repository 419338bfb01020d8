"""From samples and conversations to batches of token sequences: sequences, packing, demonstrations."""
