"""Cache files shared between processes: machine code and measurements. Texts never depend on them."""
