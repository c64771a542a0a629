"""Applications, which import public names only: the server, jobs of files, Ray, speech, and search with a value model."""
