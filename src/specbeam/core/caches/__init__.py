"""Files that are kept between processes: machine code and measurements. A text never depends on them."""
