"""The words of the embedded model, and made-up ones that it has never seen.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

from random import Random


def words(text: str) -> list[str]:
    """The words of a text, as a list."""
    return text.split()


NAMES = words(
    """
    Alice Bob Carol David Emma Frank Grace Henry Iris Jack Karen Leo Maria Nina Oscar Paula
    Quinn Rosa Sam Tina Uma Victor Wendy Xavier Yara Zoe Adam Bella Carlos Diana Ethan Fiona
    George Hannah Ivan Julia Kevin Laura Mike Nora Oliver Peter Rachel Simon Tara Vera Walter
    Anna Ben Clara Daniel Eva Felix Gina Hugo Ida Jonas Kate Liam Mia Noah Olga Paul Ruth
    Sofia Tom Ursula Vincent Will Amir Chen Fatima Hiro Priya Luca Elena Omar Yuki Marco
    Ingrid Pablo Sven Aisha Lena Max Theo Lily Milo Ruby Otto Pip Luna
    """
)
CITIES = words(
    """
    Paris London Berlin Madrid Rome Vienna Lisbon Oslo Dublin Prague Warsaw Athens Cairo Tokyo
    Delhi Seoul Lima Boston Chicago Denver Dallas Miami Toronto Sydney Moscow Beijing Nairobi
    Geneva Munich Hamburg Milan Naples Porto Bergen Helsinki Zurich Brussels Amsterdam
    Budapest Barcelona Mumbai Jakarta Manila Havana Quito Bogota Santiago Ottawa Seattle
    Houston
    """
)

ANIMALS = words(
    """
    fox cat dog bear wolf rabbit mouse owl lion tiger frog turtle horse cow pig sheep goat
    duck hen goose swan eagle crow robin bee ant spider snail whale dolphin shark seal crab
    penguin monkey elephant giraffe zebra deer moose squirrel hedgehog badger otter beaver
    camel donkey parrot dragon unicorn kitten puppy fish bird snake lizard butterfly dinosaur
    hamster
    """
)
PEOPLE = words(
    """
    robot princess prince king queen knight wizard witch pirate sailor farmer baker painter
    teacher doctor singer child boy girl giant ghost fairy mermaid astronaut detective
    inventor gardener clown soldier monster alien
    """
)
FRUITS = words(
    """
    apple banana cherry grape lemon lime mango melon orange peach pear plum kiwi fig date
    berry tomato potato carrot onion bean pepper corn bread cheese rice soup cake pie honey
    milk tea coffee juice butter egg salt sugar
    """
)
THINGS = words(
    """
    key lamp book map box coin ring hat shoe coat bell drum flute kite ball boat ship car
    train bike wheel rope bag cup bowl spoon knife plate chair table door window bed clock
    mirror candle pencil pen paper letter brush hammer nail stone feather shell leaf tree
    flower seed star moon sun cloud river lake sea island mountain forest garden house castle
    bridge tower road field cave snow rain wind fire gold silver button basket umbrella
    blanket pillow ladder bottle wagon teapot planet rocket computer phone piano violin guitar
    puzzle treasure crown sword shield
    """
)
COLORS = words(
    """
    red blue green yellow black white brown pink purple gray orange golden silver
    """
)
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday today tomorrow")
EVENTS = words("party meeting concert dinner wedding race lesson show picnic game exam lunch")
ROOMS = words("kitchen bedroom bathroom garden office garage hall")
LANGUAGES = words("French German Spanish Italian Chinese Japanese English Latin Greek Dutch")
CURRENCIES = words("dollars euros pounds yen francs USD EUR")
ADJECTIVES = words(
    """
    brave little clever kind lonely happy sad sleepy curious hungry shy proud gentle lazy busy
    tiny big old young quiet noisy funny grumpy friendly strong wise cheerful lost lucky silly
    polite honest careful
    """
)

# Words that stay out of the tokenizer on purpose: the model must spell them.
OPEN_WORDS = words(
    """
    stream level python banner market silent listen garlic pocket winter summer autumn spring
    monday friday number engine cache radix kernel tensor matrix vector hello world orchid
    velvet marble copper bronze cotton leather thunder lightning harbor village kitchen
    library museum theater station airport factory hospital library bicycle airplane submarine
    telescope microscope keyboard printer camera battery magnet hotel ticket passport wallet
    jacket sweater trousers scarf glove pumpkin spinach broccoli cucumber strawberry blueberry
    pineapple coconut almond walnut chocolate biscuit pancake sandwich noodle mushroom cabbage
    lettuce vinegar mustard cinnamon pepper octopus kangaroo leopard panther buffalo antelope
    crocodile alligator salamander mosquito beetle cricket dragonfly hummingbird woodpecker
    flamingo pelican ostrich peacock sparrow pigeon falcon desert jungle valley canyon glacier
    volcano meadow prairie swamp lagoon horizon galaxy comet asteroid gravity oxygen hydrogen
    carbon nitrogen helium crystal diamond emerald sapphire ruby symphony melody rhythm
    harmony chorus ballet opera poetry novel chapter sentence grammar alphabet science history
    geography chemistry physics biology algebra geometry fraction decimal percent justice
    freedom courage wisdom patience kindness mystery legend miracle journey adventure holiday
    birthday wedding festival carnival parade tournament champion victory trophy medal stadium
    athlete carpenter plumber electrician engineer scientist architect journalist lawyer
    dentist nurse pilot captain general emperor senator president minister mayor citizen
    neighbor stranger cousin nephew uncle grandfather grandmother sister brother daughter
    family friend partner leader member student apricot raspberry lavender magnolia dandelion
    tulip daisy sunflower maple willow bamboo cactus anchor arrow barrel blade canvas carpet
    ceiling chimney curtain drawer engine fabric furnace hinge level racecar noon civic radar
    kayak rotor refer madam lemonade avocado zucchini quartz jazz rhythm syzygy queue
    bookkeeper mississippi banana onomatopoeia
    """
)
# Ordinary words, used to build sentences, system prompts and things to repeat.
COMMON = words(
    """
    the a an and or but if then because when while after before with without about into from
    over under near between every some many few all most other another same different new good
    bad great small large long short high low early late first last next right wrong true easy
    hard quick slow warm cold hot dry wet clean dark light open closed full empty free ready
    simple special people man woman friend world country city street school work home room
    place time day night week month year morning evening today tomorrow yesterday hour minute
    thing word line page question answer story idea reason problem example name money price
    water food music game party team group company plan project report message email letter
    address user customer product service order be is are was were have has had do does did go
    went come came see saw know knew think thought take took make made get got give gave find
    found tell told ask asked use used want wanted need needed feel felt try tried leave left
    call called keep kept let begin help show hear play run move live believe hold bring
    happen write provide sit stand lose pay meet include continue set learn change lead
    understand watch follow stop create speak read spend grow walk win teach offer remember
    love consider appear buy wait serve die send build stay fall cut reach kill remain suggest
    raise pass not never always often usually sometimes maybe only just also very too really
    quite again still already here there now soon up down out off back away together alone I
    you he she it we they me him her us them my your his its our their this that these those
    who what which where why how can could will would should must may might
    """
)

SMALL = words(
    """
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen
    """
)
TENS = words("twenty thirty forty fifty sixty seventy eighty ninety")
NUMBER_WORDS = dict(enumerate(SMALL)) | {20 + 10 * i: word for i, word in enumerate(TENS)}
# Nouns whose plural is the word and an "s".
REGULAR = {
    word
    for word in ANIMALS + FRUITS + THINGS
    if not word.endswith(("s", "x", "sh", "ch", "y", "f", "fe", "o"))
} - {"mouse", "goose", "sheep", "fish", "deer"}
CLOSED_WORDS = (
    NAMES
    + CITIES
    + ANIMALS
    + PEOPLE
    + FRUITS
    + THINGS
    + COLORS
    + ADJECTIVES
    + WEEKDAYS
    + EVENTS
    + ROOMS
    + LANGUAGES
    + CURRENCIES
    + COMMON
    + list(NUMBER_WORDS.values())
)

SYLLABLE_STARTS = words(
    "b bl br c ch cl d dr f fl g gl gr h j k l m n p pl pr qu r s sh sl st t tr v w y z"
)
SYLLABLE_ENDS = ["", "", "", "n", "r", "l", "m", "t", "s", "k", "x", "nd", "rt", "p"]


def pseudo_word(rng: Random, syllables: int | None = None) -> str:
    """A pronounceable made-up word, such as "blorvik"."""
    count = syllables or rng.choice((1, 2, 2, 2, 3, 3))
    parts = [
        rng.choice(SYLLABLE_STARTS) + rng.choice("aeiou") + rng.choice(SYLLABLE_ENDS)
        for _ in range(count)
    ]
    return "".join(parts)


def letters(rng: Random, low: int = 3, high: int = 9) -> str:
    """Random letters with no sense at all, such as "xqzt"."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(low, high)))


def noun(rng: Random) -> str:
    """A thing that can stand in a list."""
    return rng.choice(rng.choice((ANIMALS, FRUITS, THINGS, COLORS)))


def any_word(rng: Random) -> str:
    """One word of any kind: known, common, never tokenised, or made up."""
    kind = rng.random()
    if kind < 0.35:
        return noun(rng)
    if kind < 0.6:
        return rng.choice(COMMON)
    if kind < 0.8:
        return rng.choice(OPEN_WORDS)
    return pseudo_word(rng) if kind < 0.95 else letters(rng)


def sentence(rng: Random, size: int) -> str:
    """Words without much sense, with a capital and a stop."""
    text = " ".join(any_word(rng) for _ in range(size))
    return text[:1].upper() + text[1:] + rng.choice("...!?")
