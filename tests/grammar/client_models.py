"""Schemas as pydantic writes them, from models of many kinds, each with an answer that follows it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from fractions import Fraction
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

from pydantic import (
    UUID4,
    AnyUrl,
    Base64Bytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    DirectoryPath,
    Discriminator,
    Field,
    FilePath,
    HttpUrl,
    Json,
    PastDate,
    PositiveInt,
    RootModel,
    SecretStr,
    StrictInt,
    StringConstraints,
    Tag,
    TypeAdapter,
    WithJsonSchema,
    computed_field,
    conint,
    conlist,
    constr,
)
from typing_extensions import TypedDict

Schema = dict[str, Any]


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Plain(BaseModel):
    name: str
    age: int
    score: float
    alive: bool


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"name": "Ada"}]})
    name: str = Field(description="Who.", examples=["Ada"], min_length=1, max_length=20)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Times(BaseModel):
    at: datetime
    on: date
    when: time
    lasting: timedelta
    past: PastDate


class Sets(BaseModel):
    tags: set[str]
    frozen: frozenset[int]
    few: Annotated[set[Color], Field(min_length=1, max_length=2)]


class Tuples(BaseModel):
    pair: tuple[int, str]
    many: tuple[int, ...]
    point: tuple[float, float] = (0.0, 0.0)


class Mappings(BaseModel):
    counts: dict[str, int]
    by_color: dict[Color, int]
    by_number: dict[int, str]
    by_id: dict[constr(pattern="^[a-z]+$"), bool]  # type: ignore[valid-type]
    anything: dict[str, Any]


class Optionals(BaseModel):
    first: str | None
    second: int | None = None
    third: list[str] | None = Field(default=None, max_length=3)


class Constrained(BaseModel):
    text: constr(min_length=2, max_length=5, pattern=r"^[a-z]+$")  # type: ignore[valid-type]
    number: conint(ge=1, lt=10, multiple_of=3)  # type: ignore[valid-type]
    numbers: conlist(int, min_length=1, max_length=2)  # type: ignore[valid-type]
    share: Annotated[float, Field(gt=0, lt=1)]
    upper: Annotated[str, StringConstraints(to_upper=True, strip_whitespace=True)]
    positive: PositiveInt
    strict: StrictInt


class Guarded(BaseModel):
    model_config = ConfigDict(regex_engine="python-re")
    password: Annotated[str, Field(pattern=r"^(?=.*\d)(?=.*[a-z]).{8,}$")]
    word: Annotated[str, Field(pattern=r"\bword\b")]


class Files(BaseModel):
    path: Path
    file: Annotated[FilePath, WithJsonSchema({"type": "string", "format": "file-path"})]
    folder: Annotated[DirectoryPath, WithJsonSchema({"type": "string", "format": "directory-path"})]


class Secrets(BaseModel):
    password: SecretStr
    token: bytes
    encoded: Base64Bytes


class Addresses(BaseModel):
    site: AnyUrl
    page: HttpUrl
    four: IPv4Address
    six: IPv6Address
    network: IPv4Network


class Numbers(BaseModel):
    price: Decimal
    exact: Annotated[Decimal, Field(max_digits=6, decimal_places=2)]
    size: ByteSize
    part: Annotated[Fraction, WithJsonSchema({"type": "string", "format": "fraction"})]


class Ids(BaseModel):
    one: uuid.UUID
    four: UUID4


class Texts(BaseModel):
    document: Json[list[int]]
    email: Annotated[str, WithJsonSchema({"type": "string", "format": "email"})]


class Choices(BaseModel):
    color: Color
    level: Level
    size: Literal["s", "m", 3, None]
    only: Literal["one"] = "one"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[str]


class Pets(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    others: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []


class Circle(BaseModel):
    shape: Literal["circle"] = "circle"
    radius: float = 1.0


class Square(BaseModel):
    shape: Literal["square"] = "square"
    side: float = 1.0


class Shapes(BaseModel):
    """The tags have defaults, so they are not required: the branches may overlap."""

    shape: Annotated[Circle | Square, Field(discriminator="shape")]


class Called(BaseModel):
    model: Annotated[
        Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")],
        Discriminator(lambda value: value["kind"] if isinstance(value, dict) else value.kind),
    ]


class Node(BaseModel):
    value: int
    children: list[Node] = []


class Linked(BaseModel):
    value: str
    next: Linked | None = None


class Category(BaseModel):
    name: str
    parent: Category | None = None
    related: dict[str, Category] = {}


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]
    total: int


class Names(RootModel[list[str]]):
    pass


class Aliased(BaseModel):
    model_config = ConfigDict(populate_by_name=True)
    class_name: str = Field(alias="class")
    x: int = Field(serialization_alias="ξ")


class Point(NamedTuple):
    x: int
    y: int = 0


class Movie(TypedDict):
    title: str
    year: int


@dataclass
class Order:
    item: str
    count: int = 1
    notes: list[str] = field(default_factory=list)


class Containers(BaseModel):
    point: Point
    movie: Movie
    order: Order
    rest: Sequence[int]


class Loose(BaseModel):
    anything: Any
    thing: object
    free: dict
    items: list


class Computed(BaseModel):
    width: int
    deprecated: int = Field(default=0, deprecated=True)

    @computed_field
    def area(self) -> int:
        return self.width**2


class Step(BaseModel):
    explanation: str
    output: str


class Reasoning(BaseModel):
    """OpenAI's example of structured output."""

    steps: list[Step]
    final_answer: str


ANSWERS: list[BaseModel] = [
    Plain(name="Ada", age=36, score=1.5, alive=False),
    Closed(name="Ada"),
    Open(name="Ada"),
    Sets(tags={"a"}, frozen=frozenset({1, 2}), few={Color.RED}),
    Tuples(pair=(1, "a"), many=(1, 2, 3)),
    Mappings(counts={"a": 1}, by_color={Color.RED: 2}, by_number={3: "x"}, by_id={"ab": True}, anything={"k": [None]}),
    Optionals(first=None),
    Optionals(first="a", second=2, third=["x"]),
    Constrained(text="abc", number=6, numbers=[1], share=0.5, upper="ABC", positive=1, strict=2),
    Ids(one=uuid.UUID(int=7), four=uuid.UUID("0f0e6a4e-8f0c-4b1e-9d3c-2f7a1b5c6d7e")),
    Choices(color=Color.BLUE, level=Level.HIGH, size=3),
    Pets(pet=Cat(kind="cat", lives=9), others=[Dog(kind="dog", tricks=["sit"])]),
    Shapes(shape=Square(side=2.0)),
    Called(model=Dog(kind="dog", tricks=[])),
    Node(value=1, children=[Node(value=2)]),
    Linked(value="a", next=Linked(value="b")),
    Category(name="a", parent=Category(name="b"), related={"c": Category(name="d")}),
    Page[Cat](items=[Cat(kind="cat", lives=1)], total=1),
    Page[int](items=[1], total=1),
    Names(["a", "b"]),
    Containers(point=Point(1, 2), movie=Movie(title="M", year=1931), order=Order("tea"), rest=[1]),
    Loose(anything=1, thing="x", free={"a": {}}, items=[1, "a"]),
    Computed(width=2),
    Reasoning(steps=[Step(explanation="e", output="o")], final_answer="4"),
]
TYPED: list[tuple[Any, object]] = [
    (Times, {"at": "2024-02-29T12:30:15Z", "on": "2024-02-29", "when": "12:30:15Z", "lasting": "P1DT2H",
             "past": "2020-01-01"}),
    (Addresses, {"site": "ftp://example.com/x", "page": "https://example.com/", "four": "127.0.0.1", "six": "::1",
                 "network": "10.0.0.0/8"}),
    (Guarded, {"password": "abcdefg1", "word": "a word here"}),
    (Files, {"path": "/data/x", "file": "/data/y", "folder": "/data"}),
    (Secrets, {"password": "p", "token": "t", "encoded": "YQ=="}),
    (Numbers, {"price": 1.5, "exact": "2.25", "size": 3, "part": "1/3"}),
    (Texts, {"document": "[1, 2]", "email": "a@example.com"}),
    (Aliased, {"class": "a", "x": 1}),
    (list[Cat], [{"kind": "cat", "lives": 9}]),
    (dict[str, list[int]], {"a": [1, 2]}),
    (int | str | None, "a"),
    (set[Literal["a", "b"]], ["a", "b"]),
]  # fmt: skip


def model_schemas() -> dict[str, tuple[Schema, object]]:
    """By name: the schema, and an answer that follows it."""
    found = {
        f"pydantic {type(answer).__name__} {place}": (
            type(answer).model_json_schema(),
            answer.model_dump(mode="json", exclude={"area"} if isinstance(answer, Computed) else None),
        )
        for place, answer in enumerate(ANSWERS)
    }
    return found | {
        f"pydantic type {place}": (TypeAdapter(kind).json_schema(), answer)
        for place, (kind, answer) in enumerate(TYPED)
    }
