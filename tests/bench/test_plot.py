"""A plot is a sound picture with every curve in its place."""

import xml.etree.ElementTree as Tree

from quire.bench.scheduler import Curve, Point, bars, svg

CURVES = [
    Curve("low & flat", (Point(16, 50), Point(64, 50), Point(256, 50))),
    Curve("rising", (Point(16, 50), Point(64, 100), Point(256, 200)), dashed=True),
]
SPACE = "{http://www.w3.org/2000/svg}"


def test_an_svg_draws_each_curve_over_a_doubling_axis() -> None:
    picture = Tree.fromstring(svg("title <1>", "rows", "µs", CURVES))
    flat, rising = picture.findall(f"{SPACE}polyline")
    places = [[tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()] for line in (flat, rising)]
    (first, second, third), risen = places
    assert second[0] - first[0] == third[0] - second[0] > 0, "16, 64 and 256 are equally far apart"
    assert first[1] == second[1] == third[1] == risen[0][1]
    assert first[1] - risen[1][1] < risen[1][1] - risen[2][1], "more is higher"
    assert "stroke-dasharray" in rising.attrib and "stroke-dasharray" not in flat.attrib
    words = {text.text for text in picture.findall(f"{SPACE}text")}
    assert {"title <1>", "low & flat", "rising", "16", "64", "256", "200"} <= words


def test_one_point_is_a_picture_too() -> None:
    picture = Tree.fromstring(svg("one", "rows", "µs", [Curve("alone", (Point(16, 0.5),))]))
    assert "alone" in {text.text for text in picture.findall(f"{SPACE}text")}


def test_bars_are_as_long_as_their_values() -> None:
    lengths = [line.count("█") for line in bars(CURVES, width=40)]
    assert lengths == [10, 10, 10, 10, 20, 40]
