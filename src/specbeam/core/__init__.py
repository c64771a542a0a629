"""The nouns: records of arrays that every room reads, and the steps that change them."""
