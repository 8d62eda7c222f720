"""How much a grammar may ask for, before it is compiled, while it is, and while it is followed. Only numbers.

The compiler cannot be stopped once it runs, so each of these bounds its work: together, to about a second. The
figures beside them were measured with llguidance 1.9 and a vocabulary of 49,152 tokens on one core.
"""

SCHEMA_BYTES = 64 * 1024
SCHEMA_DEPTH = 64  # brackets within brackets
SCHEMA_NODES = 2_048  # objects and arrays in the schema's text
SCHEMA_PROPERTIES = 512  # of one object: a mask costs 14 ms at 500 and 48 ms at 2,000
REGEX_BYTES = 16 * 1024
NUM_CHOICES = 1_024
CHOICE_BYTES = 64 * 1024  # of the whole list
LARK_BYTES = 64 * 1024
LARK_OWN_BYTES = 32 * 1024  # without its schemas: 45 KB of `"a"?` in one terminal compile in 2 s, and twice that in 8
LARK_SCHEMAS = 128  # `%json` parts of one Lark grammar: 1,000 compile in 0.4 s

# llguidance follows names by recursion and overruns a thread's stack of 8 MiB, which ends the process: at 3,000 rules
# of one another, or at 300 rules with 20 brackets in each; at 1,000 definitions of one another in a schema.
LARK_PARTS = 1_024  # see check.py: all of C has about 130
LARK_WORDS = 2_048  # also in strings: 9,500 names of a rule that may be empty make a row that takes half a second
SCHEMA_REACH = 640  # levels from each definition down to its deepest $ref, together

# Strings under several patterns at once cost exponentially: 8 patterns 20 ms, 16 0.2 s, 20 6 s, 30 minutes.
PATTERNS_IN_INTERSECTION = 8
LARK_INTERSECTIONS = 9  # `&` signs, wherever they stand: 10 patterns 0.1 s, 13 4 s, 14 more than 20 s
# A multiple of n costs n states: 10,007 compiles in 90 ms, 1,000,003 in 9 s and 280 MB.
MULTIPLES = 10_000

# Handed to llguidance. Its defaults, but for those with a reason. Each item of a row is looked for among the others,
# so that a mask of many items in long rows is slow: 300 times `("a"|"b")?` are 20,000 items and take 40 ms.
LEXER_STATES = 65_536  # 250,000 states were 130 MB
ROW_ITEMS = 2_560  # an object of 512 optional properties needs 2,048
STEP_ITEMS = 50_000  # such an object needs 30,000, most of them copies that white space makes and that cost little
LARK_STEP_ITEMS = 15_000  # of grammars without a schema: all of C needs 10,000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
GRAMMAR_SYMBOLS = 20_000  # a schema of 2,000 properties needs 15,000

# For grammars that pass the bounds above and are slow all the same. CPU seconds of the thread, so that a busy machine
# refuses no request.
FIRST_MASK_CPU_S = 0.1  # when a grammar is compiled
FOLLOWING_CPU_S = 0.25  # for a mask or a token, on the engine's loop, where all others wait
FAILING_CPU_S = 0.05  # for one that then gave up: its like would give up one after another

REASON_CHARACTERS = 300  # of llguidance's reason that an error repeats

# What a compiled grammar is charged in the cache. llguidance does not tell its size, so these are upper bounds of
# the growth of resident memory that was seen: 170 kB a mask for `(.*a.{30}){5}`, far less for ordinary schemas.
CACHE_BYTES = 256 * 1024 * 1024
BASE_BYTES = 64 * 1024
BYTES_PER_TEXT_BYTE = 256  # 2,000 properties in 40 KB took 9 MB
BYTES_PER_MASK = 176 * 1024
LEXER_BYTES = LEXER_STATES * 640  # what all states together may take
