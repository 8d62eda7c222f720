"""About nine hundred tokens of plain English, written for this test: not in any training data."""

PROSE = """\
A quire is a gathering of pages. Before there were printers, a scribe folded four sheets of parchment once, laid them
into each other, and had eight leaves, sixteen pages, to write on. When one quire was full he took the next; the book
was sewn together only at the end, and a page that was spoilt could be cut out and replaced without losing the rest.
The order of the quires was marked by a small sign at the foot of the last page, so that whoever bound the book years
later, in another town perhaps, would not confuse them. It is a good way to keep things whose length nobody knows in
advance. A letter may need three leaves and a chronicle three hundred, and neither has to wait until somebody has made
a book of the right size. Whoever has worked in an office knows the opposite as well: the ledger that was bought too
large, of which the last two hundred pages stay white for ever, and the one that was bought too small, so that the
accounts of December stand in a second volume which nobody can find. Memory in a computer is handed out in the same two
ways. One can reserve for each guest the longest stay that he might ask for, and most rooms will be empty most of the
time; or one can give him a page when he needs a page, write down in a table where his pages are, and take them back
when he has left. The second way needs a careful clerk. He must never give the same page to two guests, never take one
back that is still being read, and at the end of the day the count of free and used pages must agree with the shelf.

The ferry left at six in the morning, before the bakeries opened, and so the people who took it were either very poor
or very punctual. Marta was both. She sat on the bench behind the wheelhouse, where the engine kept the boards warm,
and counted the islands as they came out of the mist: the one with the lighthouse, the one with the goats, and the long
flat one on which, as far as anybody knew, there had never been anything at all. Her grandfather used to say that the
flat island was where the sea kept its spare stones. He had been a pilot for forty years and had run aground only once,
on a clear day, because he was looking at a heron. She had his telescope in her bag, wrapped in a towel, and a letter
from a museum in the capital that wanted to buy it. The sum they offered would pay for the roof and perhaps for the
kitchen as well. On the other hand there was the matter of the scratches. Along the brass tube he had made a small mark
for every ship that he brought safely into the harbour, and when there was no more room he had begun a second row
between the first ones, and then a third, until the metal looked like the skin of some patient animal. The museum had
written that the scratches could be polished away without difficulty. She read that sentence again while the sun came
up, folded the letter, and put it under the bench, where the wind found it before they had passed the second island.

Bread is mostly a question of time. Flour and water, left alone in a warm place, begin to work by themselves after two
or three days, because the yeast is already there, on the grain and in the air and on the hands of the baker. What one
buys in a packet is only a quicker and more obedient kind of the same thing. A dough that has had a whole night to rise
needs less kneading than one that must be ready in an hour, keeps better, and tastes of more than salt. The reason is
simple enough. While the yeast makes the bubbles, slower creatures make the acids, and water finds its way into the
parts of the flour that would otherwise stay dry. If you want to know whether a loaf is done, do not look at the colour
of the crust, which depends on the oven, but knock on the bottom and listen. A hollow sound means that the steam has
left. Then comes the hardest part of the recipe, which no book has ever been able to teach: put the knife away, open a
window, and wait until the bread is cold.
"""
