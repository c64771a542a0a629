"""The core: records, chance, laws, and the loop: plan, draft, score, verify, settle. It imports nothing outside itself."""
