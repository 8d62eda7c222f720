"""Limits of a grammar: before, during and after compilation. Constants only.

The first limits refuse what is known to be costly, with a reason; together they bound the compiler's work to about one
second. What they miss is killed by the last ones, which act on a process of its own (`compile_worker.py`). The figures
in the comments were measured with llguidance 1.9 and a vocabulary of 49,152 tokens on one core.
"""

SCHEMA_BYTES = 64 * 1024
SCHEMA_DEPTH = 64  # nested brackets
SCHEMA_NODES = 2_048  # objects and arrays in the schema's text
SCHEMA_PROPERTIES = 512  # of one object: a mask costs 14 ms at 500 and 48 ms at 2,000
REGEX_BYTES = 16 * 1024
NUM_CHOICES = 1_024
CHOICE_BYTES = 64 * 1024  # of the whole list
LARK_BYTES = 64 * 1024
LARK_OWN_BYTES = 32 * 1024  # without its schemas: 45 KB of `"a"?` in one terminal compile in 2 s, and twice that in 8
LARK_SCHEMAS = 128  # `%json` parts of one Lark grammar: 1,000 compile in 0.4 s

# llguidance resolves names by recursion. It overflows a thread's stack of 8 MiB, which kills the process, at a chain of
# 3,000 rules, of 300 rules with 20 brackets each, or of 1,000 definitions in a schema.
LARK_PARTS = 1_024  # see lark_source.py: a grammar of C has about 130
LARK_WORDS = 2_048  # also in strings: 9,500 names of a rule that may be empty make a row that takes half a second
SCHEMA_REACH = 640  # levels from each definition down to its deepest $ref, together

EXPANDED_SCHEMAS = 1_024  # of one combination: 1,365 dates compile in half a second, 5,461 in two

# Intersecting patterns costs exponential time: 8 patterns 20 ms, 16 0.2 s, 20 6 s, 30 minutes.
PATTERNS_IN_INTERSECTION = 8
LARK_INTERSECTIONS = 9  # `&` signs anywhere: 10 patterns 0.1 s, 13 4 s, 14 more than 20 s
# A multiple of n costs n states: 10,007 compiles in 90 ms, 1,000,003 in 9 s and 280 MB.
MULTIPLES = 10_000

# Passed to llguidance: its defaults, except those with a comment. Each item of a row is compared with the others, so
# a mask of many items in long rows is slow: 300 times `("a"|"b")?` is 20,000 items and takes 40 ms.
LEXER_STATES = 65_536  # 250,000 states were 130 MB
ROW_ITEMS = 2_560  # an object of 512 optional properties needs 2,048
STEP_ITEMS = 50_000  # such an object needs 30,000, mostly cheap copies due to whitespace
LARK_STEP_ITEMS = 15_000  # for grammars without a schema: one of C needs 10,000
INITIAL_LEXER_FUEL = 1_000_000
STEP_LEXER_FUEL = 200_000
GRAMMAR_SYMBOLS = 20_000  # a schema of 2,000 properties needs 15,000

# For grammars that pass the limits above and are slow nevertheless. CPU seconds of the thread, so that a busy machine
# does not reject requests.
FIRST_MASK_CPU_S = 0.1  # when a grammar is compiled
FIRST_MASK_TRIES = 3  # the fastest counts: a virtual machine charges a thread for time it did not get
FOLLOWING_CPU_S = 0.25  # for a mask or a token, on the engine's loop, where it delays all other requests
FAILING_CPU_S = 0.05  # for one that then failed: requests like it would fail one after another

# Of the process that compiles one grammar for the first time. The kernel kills it beyond them.
COMPILE_CPU_S = 2.0
COMPILE_WALL_S = 10.0  # a busy machine may need it; beyond it the machine is the reason, not the grammar
COMPILE_BYTES = 256 * 1024 * 1024

REASON_CHARACTERS = 300  # of llguidance's reason that an error quotes

# Size of a compiled grammar in the cache. llguidance does not report it, so these are upper bounds of the measured
# growth of resident memory: 170 kB per mask for `(.*a.{30}){5}`, far less for ordinary schemas.
CACHE_BYTES = 256 * 1024 * 1024
BASE_BYTES = 64 * 1024
BYTES_PER_TEXT_BYTE = 256  # 2,000 properties in 40 KB took 9 MB
BYTES_PER_MASK = 176 * 1024
LEXER_BYTES = LEXER_STATES * 640  # all states together
