"""Short stories from a small grammar: a hero, some episodes and an end.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from minisgl.tiny.words import ADJECTIVES, ANIMALS, FRUITS, NAMES, PEOPLE, THINGS, pseudo_word

HOMES = [
    "in a small house by the sea",
    "near a quiet lake",
    "at the edge of a dark forest",
    "on top of a high mountain",
    "in an old castle",
    "behind the baker's garden",
    "under a big tree",
    "in a cave by the river",
]
HOBBIES = [
    "sing songs",
    "watch the clouds",
    "collect stones",
    "dance in the rain",
    "read old books",
    "count the stars",
    "bake cakes",
    "swim in the river",
]
DAYS = [
    "One morning",
    "One day",
    "One cold night",
    "One warm evening",
    "Early one day",
    "On a rainy afternoon",
]
NEXT_DAYS = [
    "The next day",
    "A week later",
    "Soon after that",
    "When spring came",
    "Some days later",
    "The following night",
]
PLACES = [
    "the forest",
    "the river",
    "the market",
    "the old bridge",
    "the hill",
    "the garden",
    "the beach",
    "the snow",
]

# {h} hero, {f} friend with a name, {n} friend's name, {t} a thing, {p} a place, {e} food
EPISODES = [
    [
        "{d}, {h} found {at} near {p}.",
        "It belonged to {f}, who had lost it.",
        "{h} carried the {t} all the way back.",
        '{n} smiled and said, "Thank you, {h}!"',
    ],
    [
        "{d}, a great storm came to {p}.",
        "{h} heard {f} call for help.",
        "Together they made a roof from {at}, and it kept them dry.",
        "When the sun came out, {n} laughed and {h} laughed too.",
    ],
    [
        "{d}, {h} met {f} by {p}.",
        "{n} was hungry and had nothing to eat.",
        "{h} shared some {e} with {n}.",
        "In return, {n} gave {h} a shiny {t}.",
    ],
    [
        "{d}, {f} asked {h} to run a race to {p}.",
        "{n} was fast, but fell over {at}.",
        "{h} stopped and helped {n} to get up.",
        "They crossed the line side by side.",
    ],
    [
        "{d}, {h} got lost near {p}.",
        "It was dark, and {h} was afraid.",
        "Then {f} came with {at} and a warm smile.",
        "{n} showed {h} the way home.",
    ],
    [
        "{d}, {h} wanted to build {at}.",
        "It was too hard to do alone, so {h} asked {f}.",
        "They worked until the moon stood over {p}.",
        '"We did it!" said {n}, and they ate {e}.',
    ],
    [
        "{d}, {h} saw a strange light in {p}.",
        "It was {f}, who was looking for {at}.",
        "{h} looked under every stone and found it at last.",
        "{n} was so happy that they had a feast of {e}.",
    ],
]
ENDINGS = [
    "From that day on, {h} and {n} were best friends. The end.",
    "{h} went home and slept well. The end.",
    "And {h} never forgot that day. The end.",
    "They all lived happily ever after. The end.",
]


def pick(rng: Random, options: Sequence[str]) -> str:
    """A choice that prefers the front of the list: greedy decoding then has a clear favourite."""
    return options[min(int(rng.expovariate(3.0 / len(options))), len(options) - 1)]


def a(phrase: str) -> str:
    """`phrase` with "a" or "an" before it."""
    return ("an " if phrase[:1].lower() in "aeiou" else "a ") + phrase


def topic(rng: Random) -> str:
    """What a story may be about: "a fox", "a clever robot", "the sea", "a blorvik"."""
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
    """The first sentences: the subject is the hero if it comes with an article, else a dream."""
    home, hobby = pick(rng, HOMES), pick(rng, HOBBIES)
    if subject.startswith(("a ", "an ")):
        first = f"Once upon a time there was {subject} named {name}."
    else:
        first = f"Once upon a time there was a child named {name} who dreamed about {subject}."
    return [first, f"{name} lived {home} and loved to {hobby}."]


def story(rng: Random, subject: str, episodes: int = 1) -> str:
    """A story about `subject`, such as "a brave fox", with that many episodes."""
    # Half of the stories about one subject are the same story: the one told at temperature 0.
    own = Random(subject.split()[-1].lower()) if rng.random() < 0.5 else rng
    name = pick(own, [name for name in NAMES if name.lower() not in subject.lower()])
    lines = opening(own, subject, name)
    order = list(range(len(EPISODES)))
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
            "p": pick(own, PLACES),
            "e": pick(own, FRUITS[-18:]),
            "d": pick(own, DAYS if index == 0 else NEXT_DAYS),
        }
        lines += [line.format(**words) for line in EPISODES[order[index % len(order)]]]
    return " ".join(lines + [pick(own, ENDINGS).format(h=name, n=friend)])


def is_story(text: str, subject: str) -> bool:
    """Whether `text` is one whole, coherent story about `subject` (an oracle for tests)."""
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
