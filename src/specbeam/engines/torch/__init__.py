"""Any model of transformers: sessions side by side in a batch, padded to the longest."""
