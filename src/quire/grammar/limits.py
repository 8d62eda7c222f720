"""How much a grammar may ask for, before it is compiled, while it is, and while it is followed. Only numbers.

The compiler cannot be stopped once it runs, so each of these bounds its work; the figures beside them were measured
with llguidance 1.9 and a vocabulary of 49,152 tokens on one core.
"""

SCHEMA_BYTES = 64 * 1024
SCHEMA_DEPTH = 64  # brackets within brackets
SCHEMA_NODES = 2_048  # objects and arrays in the schema's text
SCHEMA_PROPERTIES = 512  # of one object: a mask costs 14 ms at 500 and 48 ms at 2,000
REGEX_BYTES = 16 * 1024
NUM_CHOICES = 1_024
CHOICE_BYTES = 64 * 1024  # of the whole list
LARK_BYTES = 64 * 1024
LARK_SCHEMAS = 128  # `%json` parts of one Lark grammar: 1,000 compile in 0.4 s

# Strings under several patterns at once cost exponentially: 8 patterns 20 ms, 16 0.2 s, 20 6 s, 30 minutes.
PATTERNS_IN_INTERSECTION = 8
# A multiple of n costs n states: 10,007 compiles in 90 ms, 1,000,003 in 9 s and 280 MB.
MULTIPLES = 10_000

# Handed to llguidance. Its defaults, but for those with a reason.
LEXER_STATES = 65_536  # 250,000 states were 130 MB
ROW_ITEMS = 10_000  # an object of 512 optional properties needs 2,048, more than the default
STEP_ITEMS = 100_000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
GRAMMAR_SYMBOLS = 500_000

REASON_CHARACTERS = 300  # of llguidance's reason that an error repeats

# What a compiled grammar is charged in the cache. llguidance does not tell its size, so these are upper bounds of
# the growth of resident memory that was seen: 170 kB a mask for `(.*a.{30}){5}`, far less for ordinary schemas.
CACHE_BYTES = 256 * 1024 * 1024
BASE_BYTES = 64 * 1024
BYTES_PER_TEXT_BYTE = 256  # 2,000 properties in 40 KB took 9 MB
BYTES_PER_MASK = 176 * 1024
LEXER_BYTES = LEXER_STATES * 640  # what all states together may take
