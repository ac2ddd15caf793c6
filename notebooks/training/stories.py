"""Short stories from a small grammar: a hero, some episodes and an end.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from training.tables import TABLES
from training.words import ADJECTIVES, ANIMALS, FRUITS, NAMES, PEOPLE, THINGS, pseudo_word

PARTS: dict[str, Any] = TABLES["stories"]


def pick(rng: Random, options: Sequence[str]) -> str:
    """Choose with a preference for the front, so that greedy decoding has a clear favourite."""
    return options[min(int(rng.expovariate(3.0 / len(options))), len(options) - 1)]


def a(phrase: str) -> str:
    """Return `phrase` with "a" or "an" before it."""
    return ("an " if phrase[:1].lower() in "aeiou" else "a ") + phrase


def topic(rng: Random) -> str:
    """Sample the subject of a story: "a fox", "a clever robot", "the sea", "a blorvik"."""
    kind = rng.random()
    hero = rng.choice(rng.choice((ANIMALS, PEOPLE, THINGS))) if kind < 0.8 else pseudo_word(rng)
    if kind < 0.45:
        return a(hero)
    if kind < 0.7:
        return a(f"{rng.choice(ADJECTIVES)} {hero}")
    if kind < 0.9:
        return rng.choice(("the ", "", "my ")) + hero
    return rng.choice(NAMES)


def opening(rng: Random, subject: str, name: str) -> list[str]:
    """Write the first sentences: a subject with an article is the hero, any other a dream."""
    home, hobby = pick(rng, PARTS["homes"]), pick(rng, PARTS["hobbies"])
    if subject.startswith(("a ", "an ")):
        first = f"Once upon a time there was {subject} named {name}."
    else:
        first = f"Once upon a time there was a child named {name} who dreamed about {subject}."
    return [first, f"{name} lived {home} and loved to {hobby}."]


def story(rng: Random, subject: str, episodes: int = 1) -> str:
    """Write a story about `subject`, such as "a brave fox", with `episodes` episodes."""
    # Half of the stories about one subject are the same, which the model writes at temperature 0.
    own = Random(subject.split()[-1].lower()) if rng.random() < 0.5 else rng
    name = pick(own, [name for name in NAMES if name.lower() not in subject.lower()])
    lines = opening(own, subject, name)
    order = list(range(len(PARTS["episodes"])))
    own.shuffle(order)
    friend = name
    for index in range(episodes):
        friend = pick(
            own,
            [other for other in NAMES if other != name and other.lower() not in subject.lower()],
        )
        thing = pick(own, THINGS)
        words = {
            "h": name,
            "n": friend,
            "f": f"{friend} the {pick(own, ANIMALS)}",
            "t": thing,
            "at": a(thing),
            "p": pick(own, PARTS["places"]),
            "e": pick(own, FRUITS[-18:]),
            "d": pick(own, PARTS["days"] if index == 0 else PARTS["next_days"]),
        }
        lines += [line.format(**words) for line in PARTS["episodes"][order[index % len(order)]]]
    return " ".join(lines + [pick(own, PARTS["endings"]).format(h=name, n=friend)])


def is_story(text: str, subject: str) -> bool:
    """Return True if `text` is one whole story about `subject` (an oracle for tests)."""
    head, _, rest = text.partition(" named ")
    name = rest.split(" ")[0].rstrip(".")
    told = subject.lower() in text.split(". ")[0].lower() and head.startswith("Once upon a time")
    people = [word.strip('.,!?"') for word in text.split()]
    known = [word for word in people if word in NAMES and word.lower() not in subject.lower()]
    friends = {word for word in known if word != name}
    return (
        told
        and name in NAMES
        and known.count(name) >= 3
        and text.endswith("The end.")
        and all(known.count(friend) >= 2 for friend in friends)
    )
