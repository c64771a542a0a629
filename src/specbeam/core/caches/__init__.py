"""Cache files shared between processes: machine code and measurements. Generated texts never depend on them."""
