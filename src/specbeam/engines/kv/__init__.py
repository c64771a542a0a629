"""The KV trie of a session, the store of its keys and values, and who may look at what."""
