"""How long a meta-iteration takes, beside other libraries and beside what the machine could do at best."""
