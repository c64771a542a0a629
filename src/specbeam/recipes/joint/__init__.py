"""Joint methods, which change the output law: multi-token joint decoding (MTJD, MTAD) and its beams."""
