"""The KV trie of a session, the store of keys and values, and the attention masks."""
