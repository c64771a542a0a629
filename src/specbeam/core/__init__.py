"""Records of arrays that every folder reads, and the steps that create and change them."""
