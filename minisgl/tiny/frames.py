"""The core of each request in several grammatical forms, and phrasings that only the evaluation
uses.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

CORES: dict[str, dict[str, list[str]]] = {}
KINDS: dict[str, str] = {}  # what the data of a request is called, where the core leaves it out
CORES["add"] = {
    "do": [
        "[add|sum|add up|add together|sum up|total] [|the numbers |the two numbers |up ]{0} "
        "[and|to|with|plus] {1}",
        "[compute|calculate|solve|work out|evaluate|answer|do|handle|find] {0} [+|plus] {1}",
        "[compute|calculate|find|work out|determine] the [sum|total] of {0} and {1}",
        "[put|count|take] {0} and {1} together",
        "[take|start with|begin with] {0} and add {1}",
        "[increase|raise] {0} by {1}",
    ],
    "doing": ["[adding|summing|adding up|computing|calculating] {0} [and|+|plus] {1}"],
    "noun": [
        "the [sum|total|result] of {0} [and|+|plus] {1}",
        "{0} [plus|+] {1}",
        "the [result|outcome|sum|value|answer] of [adding {0} and {1}|{0} + {1}|{0} plus {1}]",
        "the [answer|solution|result] [to|for] {0} [+|plus] {1}",
        "[sum|total|addition|the addition] of {0} and {1}",
    ],
    "clause": [
        "what {0} [+|plus|and] {1} [is|makes|make|gives|equals|comes to|adds up to|will be|would "
        "be]",
        "how much {0} [and|plus|+] {1} [is|are|make|makes|gives|comes to]",
        "what [you get|we get|I get|comes out|happens] [when|if] [you|I|we] add {0} [and|to] {1}",
        "what the sum of {0} and {1} is",
        "how much you have if you add {0} to {1}",
    ],
    "question": [
        "what [is|are] {0} [+|plus|and] {1}",
        "how much [is|are] {0} [plus|and|+] {1}[| together| in total| in all]",
        "how [much|many] [do|does|will|would] {0} [and|plus|+] {1} [make|give|be|come to]",
        "what [do you get|do I get|happens|comes out|does one get] [when|if] [you|we|I] add {0} "
        "[and|to] {1}",
        "what [does|will|would|do|should|can] {0} [+|plus|and] {1} [make|give|equal|come to|be|"
        "add up to|result in|yield]",
        "[I have|if I have|there are|she has|Tom has|we have] {0} [apples|coins|books|cats|points|"
        "stones|eggs] and [get|find|buy|add|receive] {1} more[. How many|, how many] [is that|are "
        "there now|in total|do I have now|altogether|is it in all]",
    ],
    "bare": [
        "{0} + {1}[||=| =| = ?|?|=?]",
        "{0}+{1}[||=|=?|?]",
        "{0} plus {1}[|?| is| equals| makes| equals what?| is what?]",
        "[Sum|Addition|Add|Total|Math question|Sum of|Plus|Calculator]: {0} [+|and|,|plus] {1}[|?]",
        "{0} [+|plus|and] {1}[,|:|...|;] [what is that|how much is that|what does it make|what is "
        "it|how much|please|what is the sum|how many is that|and that makes|the answer]?",
        "{0} and {1} [make what|is how much|together|added together|in total|summed up][?|]",
        "{0} [+|plus] {1} [please|for me|now|and quickly|if you can][.||!|?]",
    ],
}
CORES["sort"] = {
    "do": [
        "[sort|order|arrange|rank|sort out|rearrange] [these|the following|this list "
        "of|the|my|these few|"
        "some] [numbers|values|integers|scores]",
        "[sort|order|arrange|rank] [these|these numbers|the values|them|this|the list|it] [in "
        "ascending order|from smallest to largest|from low to high|in increasing order|smallest "
        "first|lowest first|from the lowest to the highest|by size|by value|upwards|from small "
        "to big]",
        "[sort|order|arrange|rank] {0}[| from smallest to largest| in ascending order| by size]",
        "[put|bring|get|write|list|place] [these|the numbers|these numbers|the following|my "
        "numbers|"
        "this list] [in|into] [order|ascending order|the right order|increasing order|a sorted "
        "order]",
        "[put|bring|get] {0} [in|into] [order|ascending order|increasing order|the right order]",
        "[line up|go through] the numbers from smallest to largest",
    ],
    "doing": [
        "[sorting|ordering|arranging|ranking] {0}",
        "[sorting|ordering|arranging] [these|these numbers|the list|my numbers|the following]",
        "[putting|bringing] [these|the numbers] [in|into] [order|ascending order]",
    ],
    "noun": [
        "{0} [sorted|in order|in sorted order|from smallest to largest|in ascending order]",
        "[these|these numbers|the numbers|my numbers|this list|the list] [sorted|in order|in "
        "ascending order|from smallest to largest|smallest first|sorted by size]",
        "the [sorted|ordered|ascending] [list|version of this list|numbers|order]",
        "the [ascending|sorted|increasing|right] order of {0}",
    ],
    "clause": [
        "[how|in which order] [these numbers|the numbers|they] [go|come] from smallest to largest",
        "what {0} [is|looks like] [sorted|in order|in ascending order]",
        "what [the sorted list|the ascending order] is",
    ],
    "question": [
        "which order do [these|the] numbers go in, smallest first",
        "what is {0} [sorted|in order|in ascending order]",
        "how [do you|would you|do I] [sort|order] [these numbers|{0}]",
    ],
    "bare": [
        "[Sorted list|Ascending order|Numbers to sort|Sort|Sort this|Sort these|Order|Sort "
        "ascending]: {0}",
        "{0} [sorted|in order|in ascending order][|, please|?]",
        "{0}\n[Sorted|Now sorted|In order|Sort|Sort ascending][:|.|!||, please]",
    ],
}
KINDS["sort"] = "numbers"
CORES["sort down"] = {
    "do": [
        "[sort|order|arrange|rank] [these|the following|the|my|these] [numbers|values|scores] [in "
        "descending order|from largest to smallest|from high to low|in decreasing order|largest "
        "first|biggest first|highest first|downwards]",
        "[sort|order|arrange] {0} [in descending order|from largest to smallest|from biggest to "
        "smallest|largest first|from high to low|downwards|in decreasing order]",
        "[put|bring|get|list] [these|these numbers|the numbers] [in|into] [descending|decreasing|"
        "falling] order",
        "[put|bring] {0} [in|into] [descending|decreasing] order",
    ],
    "doing": [
        "[sorting|ordering|arranging] {0} [downwards|in descending order|from largest to smallest]",
        "[putting|bringing] [these|the numbers] in [descending|decreasing] order",
    ],
    "noun": [
        "{0} [in descending order|from largest to smallest|sorted downwards|largest first]",
        "[these|the numbers|my numbers] [in descending order|from largest to smallest|biggest "
        "first]",
        "the [descending|decreasing] order of {0}",
    ],
    "clause": ["how [these|the] numbers go from [largest to smallest|high to low]"],
    "question": ["what is {0} in [descending|decreasing] order"],
    "bare": [
        "[Descending order|Largest first|Sort descending|From big to small|Descending]: {0}",
        "{0}\n[Descending|Largest first|From high to low|Sort descending][:|.||, please]",
    ],
}
KINDS["sort down"] = "numbers"
CORES["sort words"] = {
    "do": [
        "[sort|order|arrange] [these|the following|the|my|some] [words|names|items|things]",
        "[sort|order|arrange] [these|these words|the names|them|this list] [alphabetically|in "
        "alphabetical order|from A to Z|by the alphabet|by letter|as in the alphabet]",
        "[sort|order|alphabetize|arrange] {0}[|| alphabetically| in alphabetical order| from A "
        "to Z]",
        "[put|bring|get|write|list] [these|these words|the words|the names|these items] [in|into] "
        "alphabetical order",
        "[put|bring] {0} [in|into] alphabetical order",
    ],
    "doing": [
        "[sorting|ordering|arranging|alphabetizing] [{0}|these words|the names]",
        "[putting|bringing] [these words|{0}] [in|into] alphabetical order",
    ],
    "noun": [
        "{0} [in alphabetical order|from A to Z|sorted alphabetically]",
        "[these words|the words|these names|my words] [in alphabetical order|from A to Z|sorted "
        "alphabetically]",
        "the alphabetical order of {0}",
    ],
    "clause": ["how [these|the] [words|names] go from A to Z"],
    "question": ["what is {0} in alphabetical order", "how do you sort these words"],
    "bare": [
        "[Alphabetical order|Sort|Sort these|Sort alphabetically|Words to sort|A to Z]: {0}",
        "{0}\n[Alphabetical order|From A to Z|Alphabetically][:|.||, please]",
    ],
}
KINDS["sort words"] = "words"

CORES["reverse word"] = {
    "do": [
        "[reverse|flip|turn around|invert|mirror] [|the word |the letters of |the letters in |the "
        "text |the string |the term ][{0}|\"{0}\"|'{0}']",
        "[reverse|flip|turn around|invert] [the word|this word|the following word|this|the letters|"
        "the letters of this word|this string]",
        '[spell|write|say|type|read|print] [|the word |the letters of ][{0}|"{0}"] [backwards|in '
        "reverse|backward|the other way round|from back to front|from right to left|reversed|from "
        "the last letter to the first|from the end|in the reverse direction]",
        "[spell|write|say|type|read|print] [the word|this word|the following|this] [backwards|in "
        "reverse|backward|from back to front|from right to left|in reverse order]",
        '[turn|put|make|flip] [|the word |the letters of ][{0}|"{0}"] [around|backwards|in '
        "reverse|back to front|the other way round|in reverse order|upside down]",
        '[take|use|pick] [|the word ][{0}|"{0}"] and [reverse it|write it backwards|flip it|spell '
        "it backwards|say it in reverse|read it from the end|invert it|mirror it]",
        '[change|reverse|flip|invert] the order of the letters [in|of] [|the word ][{0}|"{0}"]',
    ],
    "doing": [
        '[reversing|flipping|inverting|turning around] [|the word |the letters of ][{0}|"{0}"]',
        '[spelling|writing|saying|reading] [|the word ][{0}|"{0}"] [backwards|in reverse|from '
        "right to left]",
    ],
    "noun": [
        "[|the word |the letters of ][{0}|\"{0}\"|'{0}'] [backwards|reversed|in reverse|spelled "
        "backwards|written backwards|in reverse order|from back to front]",
        'the [reverse|reversal|mirror image|backwards spelling] of [|the word ][{0}|"{0}"]',
        'the [reversed|backwards] [form|version|spelling] of [|the word ][{0}|"{0}"]',
        'the letters of [|the word ][{0}|"{0}"] from [last to first|right to left|end to start]',
    ],
    "clause": [
        'how [|the word ][{0}|"{0}"] [is spelled|is written|reads|sounds|would look|would read|'
        "goes] [backwards|in reverse|reversed|from right to left]",
        'what [|the word ][{0}|"{0}"] [is|reads|looks like|becomes|spells] [backwards|reversed|'
        "in reverse|when reversed|when you reverse it|from right to left]",
        'how [to spell|to write|you spell|you write|one writes] [{0}|"{0}"] [backwards|in reverse]',
        'what you get when you [reverse|flip] [|the word ][{0}|"{0}"]',
    ],
    "question": [
        "what is [|the word ][{0}|\"{0}\"|'{0}'] [backwards|reversed|in reverse|spelled backwards]",
        'how do you [spell|write|say|read] [|the word ][{0}|"{0}"] [backwards|in reverse]',
        'how [does|would|will] [|the word ][{0}|"{0}"] [look|read|sound|go] [backwards|reversed|in '
        "reverse|from right to left|from the end]",
        'what [does|would|do] [|the word |the letters of ][{0}|"{0}"] [become|look '
        "like|spell|read] "
        "[backwards|reversed|in reverse|from the back]",
        'what do [you|I|we] get [when|if] [you|I|we] reverse [|the word ][{0}|"{0}"]',
    ],
    "bare": [
        "[Reverse|Backwards|Reversed|Word to reverse|Reverse this word|Reverse word|Flip]: {0}",
        '[{0}|"{0}"] [backwards|reversed|in reverse|spelled backwards|but reversed][|?|, please|!]',
        "{0}\n[Backwards|Now backwards|Reversed|In reverse][:|.|!||, please]",
    ],
}
KINDS["reverse word"] = "word"
CORES["reverse list"] = {
    "do": [
        "[reverse|flip|turn around|invert] [this list|the list|the following list|the order of "
        "this list|the following|these items|these|the items|my list|these things]",
        "[reverse|flip|invert] [|the list |the order of ]{0}",
        "[say|write|list|give me|repeat|show|read] [these|the following|this list|these items|the "
        "items] [backwards|in reverse order|in reverse|from last to first|in the opposite order]",
        "[put|bring|turn] [the items|this list|these|the list] [in|into] reverse order",
        "[start|begin] [with the last item|at the end of the list] and go to the first",
    ],
    "doing": [
        "[reversing|flipping|inverting] [this list|the list|these items|the list {0}]",
        "[reading|writing|listing] these items [backwards|from last to first|in reverse order]",
    ],
    "noun": [
        "[this list|the list|these items|the items|my list] [backwards|in reverse|reversed|in "
        "reverse order|from last to first]",
        "the [reverse|reverse order|reversed order] of [this list|the list|these items|the list "
        "{0}]",
        "the [reversed|backwards] list",
    ],
    "clause": [
        "what [this|the] list [is|looks like|would be] [backwards|in reverse|reversed]",
        "how [this|the] list [goes|reads|looks] [backwards|from last to first|in reverse]",
    ],
    "question": [
        "what is [this|the] list [backwards|in reverse|reversed]",
        "how does [this|the] list [go|read|look] [backwards|in reverse order|from the end]",
    ],
    "bare": [
        "[Reverse|Backwards|Reverse order|Reverse list|Last to first|Reverse the list]: {0}",
        "{0}\n[Reverse this list|Now backwards|Reverse the list|Reverse them|Reversed][.||:]",
    ],
}
KINDS["reverse list"] = "list"
CORES["count items"] = {
    "do": [
        "count [these|the items|the things|the items in this list|the entries|the elements|the "
        "words|how many there are|them|how many items there are|all items|everything in this list]",
        "[find|determine|compute|work out|give] the [number|count] of "
        "[items|things|entries|elements]",
        "count the [items|things|entries|elements] in {0}",
        "[find|give] the length of [this|the|my] list",
    ],
    "doing": ["counting [these|the items|these things|the entries|the words|the items in my list]"],
    "noun": [
        "the [number|count|total number] of [items|things|entries|elements] [in this list|in the "
        "list|here|]",
        "the [length|size] of [this|the|my] list",
    ],
    "clause": [
        "how many [items|things|entries|elements|words] [there are|are here|are in the list|are "
        "listed|I have|you see|you count|are in my list|there are in my list]",
        "how [long|big] [this|the|my] list is",
        "how many [items|things|entries] [this|the|my] list [has|contains|holds]",
    ],
    "question": [
        "how many [items|things|entries|elements|words|numbers|names|] [are|are there] [in this "
        "list|in the list|here|in the following list|in total|listed here]",
        "how many [items|things|entries|elements] does [this|the|my] list [have|contain|hold]",
        "how many [items|things|entries] are in {0}",
        "how long is [this|the|my] list",
        "how many are [these|there]",
    ],
    "bare": [
        "[Count|Count these|How many|How many are there|How many items|Number of items|Length of "
        "the list|Item count]: {0}[|?]",
        "[I have|I bought|There is|I see|My list is] {0}. How many [things|items] [is that|are "
        "there|do I have|are in my list][?|]",
        "{0}\n[How many is that|How many items|Count them|How many are there|How many][?|]",
    ],
}
CORES["count same"] = {
    "do": [
        "count [the word|how often you see|every|the number of times you see|all|each|] {1} in "
        "[this list|the list|the following|this]",
        "[find|say] how [often|frequently] {1} [occurs|appears|comes up|can be found]",
    ],
    "doing": ["counting [the word|every|] {1} in [this list|the list]"],
    "noun": ["the [number of times|count of|number of] {1} [in this list|in the list|here]"],
    "clause": [
        "how [often|many times] {1} [appears|occurs|comes up|is there|shows up|stands there]",
        "how many of these are {1}",
    ],
    "question": [
        "how many times [does|did] {1} [appear|occur|come up|show up] in [|this list|the list|the "
        "following|this text]",
        "how [often|many times] [is {1} in|does {1} occur in|do you see {1} in|do you find {1} in] "
        "[this list|the list|the following list]",
        "how many of these are {1}",
        "how many times is {1} [there|listed|mentioned]",
    ],
    "bare": [
        "[In this list|In the list], how many times [do you see|is there|does it say] {1}: {0}"
    ],
}
CORES["count plural"] = {
    "do": ["count [the|all|my] {1}s [in|in this list|here|in the list]"],
    "clause": ["how many {1}s [there are|you see|I have|are in the list|are here|you can find]"],
    "question": [
        "how many {1}s are [there|there here|in this list|in the list|here]",
        "how many {1}s do [you see|I have|you count|you find|we have]",
    ],
    "bare": [
        "[I have|I see|There are|I bought] {0}. How many {1}s [is that|are there|do I have|do you "
        "see][?|]",
    ],
}
KINDS |= dict.fromkeys(("count items", "count same", "count plural"), "list")

CORES["count letters"] = {
    "do": [
        'count the letters [in|of] [|the word |the name |the term ][{0}|"{0}"]',
        "count [the letters|the letters in this word|how many letters there are|the letters of "
        "this word|all letters]",
        "[find|determine|compute|give|get] the [number of letters|letter count] [in|of] [|the "
        "word ]"
        '[{0}|"{0}"]',
    ],
    "doing": ['counting the letters [in|of] [|the word ][{0}|"{0}"]'],
    "noun": [
        'the [number|count|total] of letters [in|of] [|the word ][{0}|"{0}"]',
        'the [length|letter count] of [|the word |the name ][{0}|"{0}"]',
    ],
    "clause": [
        "how many letters [there are|you see|you count|one finds|you find] in [|the word ]"
        '[{0}|"{0}"]',
        'how many letters [|the word |the name ][{0}|"{0}"] [has got|contains|consists of|is made '
        "of|needs]",
        'how long [|the word ][{0}|"{0}"] is',
        "how many letters [this word|it] [has|contains]",
    ],
    "question": [
        'how many letters [are|are there] in [|the word |the name ][{0}|"{0}"]',
        'how many letters does [|the word |the name ][{0}|"{0}"] [have|contain|consist of|need]',
        'how long is the word [{0}|"{0}"]',
        'what is the [length|number of letters] of [|the word ][{0}|"{0}"]',
        'of how many letters [is|does] [|the word ][{0}|"{0}"] [made|consist]',
    ],
    "bare": [
        "[Letters in|Number of letters in|Count letters|Count the letters|Letter count]: {0}",
        '[{0}|"{0}"][:|,] how many letters[?| is that?| are there?]',
    ],
}
CORES["count letter"] = {
    "do": [
        'count the [letter {1}|{1}\'s|letters {1}] in [|the word ][{0}|"{0}"]',
        "[find|say] how often the letter {1} [is|occurs|appears] in [|the word ]{0}",
    ],
    "doing": ["counting the [letter {1}|{1}'s] in [|the word ]{0}"],
    "noun": ["the number of [{1}'s|letters {1}|times the letter {1} occurs] in [|the word ]{0}"],
    "clause": [
        'how many [times|] the letter {1} [appears|occurs|is] in [|the word ][{0}|"{0}"]',
        "how [often|many times] [you see|there is] [the letter|an|a] {1} in [|the word ]{0}",
        'how many {1}\'s [there are|are] in [|the word ][{0}|"{0}"]',
    ],
    "question": [
        "how many times [does the letter {1} appear|is the letter {1}|does {1} occur] in [|the "
        "word ]"
        '[{0}|"{0}"]',
        'how many [|letters ]{1}[\'s|s|] are [|there ]in [|the word ][{0}|"{0}"]',
        "how many [letter {1}|{1}'s] does [|the word ]{0} have",
        "how often [does the letter {1} occur|is the letter {1}] in [|the word ]{0}",
    ],
}
KINDS |= dict.fromkeys(("count letters", "count letter"), "word")
CORES["count to"] = {
    "do": [
        "count [|up |aloud |for me ]to {1}",
        "count [|up |on |aloud ]from {0} [to|up to|until] {1}",
        "[say|list|write|print|name|tell me|give me] [the|all|] numbers from {0} to {1}",
    ],
    "doing": ["counting [to {1}|from {0} to {1}|up to {1}]"],
    "noun": ["[the|all|] numbers [from|between] {0} [to|and] {1}", "the numbers up to {1}"],
    "bare": ["[Count|Count to|Numbers up to|Count up to]: {1}", "{0} to {1}[|, please]"],
}
CORES["count down"] = {
    "do": [
        "count [down|backwards|back] from {0}[| to {1}]",
        "[say|list|write] the numbers from {0} down to {1}",
    ],
    "doing": ["counting [down|backwards] from {0}[| to {1}]"],
    "noun": ["[a countdown|the countdown] from {0}[| to {1}]"],
    "bare": ["[Countdown|Count down] from {0}[| to {1}]", "{0} down to {1}[|, please]"],
}
CORES["copy"] = {
    "do": [
        "[repeat|say|copy|echo|write|type|print|output|parrot|recite] [this|the following|exactly "
        "this|this text|these words|the following text|this sentence|my words|the words|the text|"
        "this line|the next words|what I say|exactly what I say]",
        "[repeat|say|echo|write|type] [after me|this after me|this back to me|it back|back to me|"
        "this again|this once more|back what I write]",
        "[repeat|say|copy|echo|print|write|parrot|type] [|the words |the text |the sentence |the "
        'phrase |the line ]"{0}"',
        "[answer|reply|respond|come back] with [these words|this text|the same text|the same words|"
        "exactly this|nothing but this|my words]",
        "[give|send|hand|read] [me back|me] [this text|the same text|these words|this]",
        "[act like|be like|play] [a|the|my] [parrot|echo|copy machine|mirror] and [repeat|say] "
        "this",
    ],
    "doing": [
        "[repeating|saying|copying|echoing|printing] [this|the following|these words|after me]",
        '[repeating|saying|copying|echoing] [|the words |the text ]"{0}"',
    ],
    "noun": [
        "[a copy|an exact copy|a repetition] of [this|the following|this text|these words]",
        "[the same text|the same words|this text|these words] [again|once more|back]",
    ],
    "bare": [
        "[Repeat|Say|Copy|Echo|Repeat after me|Say after me|Repeat this|Copy "
        "this|Print|Write|Parrot|"
        "Echo this|Copy that]: {0}",
        "[Repeat after me|Say after me|Copy this text|Repeat the following|Write this "
        "down|Echo]:\n{0}",
        "{0}\n[Repeat the text above|Repeat that|Copy the text above|Say that again|Echo that][.|]",
        "[I say something, you say it again|I speak and you repeat it|You are my echo|My words, "
        "your "
        "words|You are a parrot|I write, you copy it]: {0}",
    ],
}
KINDS["copy"] = "text"
CORES["story"] = {
    "do": [
        "[tell me|tell|write|write me|make up|give me|invent|tell us|create|read me|think of] a "
        "[||short |little |nice |bedtime |new |funny |good ][story|story|tale|fairy tale] "
        "[about|about|about|of|with] {0}",
        "[let|make] {0} be the [hero|subject] of a story",
    ],
    "doing": ["[telling|writing|inventing|making up] a [|short |little ][story|tale] about {0}"],
    "noun": [
        "a [||short |little |nice |bedtime |new |funny ][story|story|tale|fairy tale] "
        "[about|about|with|of] {0}",
        "the [story|tale] [of|about] {0}",
    ],
    "clause": ["what [a|the] [story|tale] [of|about] {0} [is|would be] like"],
    "question": ["[do you know|do you have|is there|can I hear] a story [about|with|of] {0}"],
    "bare": [
        "[Story|A story|Story time|Short story|One story|Tale]: {0}[|.]",
        "[A |]story about {0}[| please|.|!]",
    ],
}
CORES["long story"] = {
    "do": [
        "[tell me|write|write me|make up|give me|tell] a [long|very long|longer|really long] "
        "[story|"
        "tale] [about|of|with] {0}",
    ],
    "noun": ["a [long|very long|really long] [story|tale] about {0}"],
    "bare": ["[Long story|A long story]: {0}"],
}
CORES["any story"] = {
    "do": [
        "[tell me|tell|write|make up|give me|read me|tell us] a[|nother] [|short |little |nice |"
        "bedtime ][story|tale]",
    ],
    "noun": ["a [|short |little |bedtime ][story|tale]", "[another|one more] [story|tale]"],
    "bare": ["[A story please|Story time|Story|Another story|One more story][.|!|]"],
}

CORES["json"] = {  # {0} is the text, {1} the keys, {2} a schema or an example
    "do": [
        "[answer|reply|respond] [in|with|using|as] JSON[ and use|, with|, keys:| with| with the "
        "keys|"
        " with the fields] {1}",
        "[extract|find|get|collect|read|take] {1} [as JSON|and answer in JSON|in JSON "
        "format|into JSON|"
        "from this text as JSON|and return JSON]",
        "[return|give me|write|output|print|make|create|produce|build|send] [a JSON "
        "object|JSON|valid "
        "JSON|a JSON] with [|the keys |the fields |keys |fields |only ]{1}",
        "[turn|convert|put|change|transform] [this|the text|this text|the following] into "
        "[JSON|a JSON "
        "object] with [|the keys |the fields |keys ]{1}",
    ],
    "doing": [
        "[answering|replying] in JSON with {1}",
        "[extracting|finding|collecting] {1} [as|in] JSON",
    ],
    "noun": [
        "[a JSON object|JSON|the JSON|a JSON answer] with [|the keys |the fields ]{1}",
        "{1} [as JSON|in JSON|as a JSON object|in JSON format]",
    ],
    "clause": ["what {1} [is|are|must be], [in|as] JSON"],
    "question": [
        "what [is|are] {1} [here|in this text|]? [Answer|Reply] in JSON",
        "can I have {1} [as|in] JSON",
    ],
    "bare": [
        "JSON with {1}: {0}",
        "{0}\n[JSON|As JSON|In JSON|JSON keys]: {1}",
        "{0} [As JSON|Answer in JSON|JSON] with {1}.",
    ],
}
CORES["json schema"] = {
    "do": [
        "[answer|reply|respond] [in|with] JSON [that matches|that fits|for|with] [the|this] "
        "schema: {2}",
        "use this [JSON schema|schema|format]: {2}",
        "fill [this|in this|out this] JSON: {2}",
        "[extract|return] the data as JSON [like this|in this format|with this schema]: {2}",
    ],
    "bare": [
        "{0}\n[Schema|JSON schema|Output schema|Format|JSON]: {2}",
        "[Schema|JSON schema|Output schema]: {2}\n[Text|Input]: {0}",
    ],
}
CORES["json all"] = {
    "do": [
        "[turn|convert|put|change] [this|the text|this text|it|the data] into [JSON|a JSON object]",
        "[write|give me|return|show] [this|the data|it|all of it] [as|in] JSON",
        "[answer|reply] in JSON",
    ],
    "noun": ["[this|the data|the same] [as|in] JSON", "the JSON [of|for] this"],
    "bare": [
        "[JSON|As JSON|To JSON|Make JSON|JSON please]: {0}",
        "{0}\n[as JSON|in JSON][|, please|:]",
    ],
}
CORES["json list"] = {
    "do": [
        "[put|turn|write|convert|list] [these|the items|this list|them] [as|into|in] a JSON "
        "[array|list]",
        "[return|give me|make|build] a JSON [array|list] of [these|these items|the items]",
    ],
    "noun": [
        "[these|the items|this list] as a JSON [array|list]",
        "a JSON [array|list] of [these|them]",
    ],
    "bare": ["[JSON array|JSON list|As a JSON array]: {0}"],
}
CORES["json unasked"] = {  # only a grammar asks for JSON
    "bare": [
        "{0}",
        "{0}",
        "[Extract the data|Who is it|Extract the information|What does it say|Parse this|"
        "Extract it|Read this|Find the facts|Extract the event information|Get the "
        "details][:|.\n|:\n] {0}",
        "{0}\n[Extract the data|Who is it?|What is it?|Parse it.|Extract the information.]",
    ],
}
KINDS |= dict.fromkeys(("json", "json schema", "json all", "json unasked"), "text") | {
    "json list": "list"
}

# What a text may say: field -> its names, the kind of its value, and ways to say it.
FIELDS: dict[str, tuple[str, str, list[str]]] = {
    "age": (
        "[age|age|age|years]",
        "int",
        ["is {v} years old", "is {v}", "turned {v}", "is aged {v}"],
    ),
    "city": (
        "[city|city|town|place|home|location]",
        "city",
        ["lives in {v}", "comes from {v}", "is from {v}", "moved to {v}", "is in {v}"],
    ),
    "job": (
        "[job|job|profession|occupation|role|work]",
        "job",
        ["works as a {v}", "is a {v}", "wants to be a {v}", "has a job as a {v}"],
    ),
    "color": ("[color|favorite_color]", "color", ["likes {v}", "loves {v}", "wears {v}", "is {v}"]),
    "food": (
        "[food|favorite_food|meal]",
        "food",
        ["eats {v}", "likes {v}", "cooks {v}", "wants {v}"],
    ),
    "pet": (
        "[pet|animal]",
        "animal",
        ["has a {v}", "owns a {v}", "lives with a {v}", "feeds a {v}"],
    ),
    "score": ("[score|points]", "int", ["has {v} points", "scored {v} points", "got {v} points"]),
    "student": ("[student|is_student]", "bool", ["is {v}a student"]),
    "friends": ("[friends|friends|people|names]", "names", ["knows {v}", "is a friend of {v}"]),
    "price": (
        "[price|price|cost|amount|total]",
        "money",
        ["costs {v} dollars", "is sold for {v} euros", "costs {v}", "has a price of {v}"],
    ),
    "quantity": (
        "[quantity|count|number|stock]",
        "int",
        ["comes in packs of {v}", "is there {v} times"],
    ),
    "size": (
        "[size|weight|length]",
        "int",
        ["weighs {v} kilos", "is {v} meters long", "has size {v}"],
    ),
    "day": ("[day|date|weekday]", "day", ["is on {v}", "takes place on {v}", "starts on {v}"]),
    "people": (
        "[participants|people|guests|names]",
        "names",
        ["is planned by {v}", "is attended by {v}", "takes place with {v}", "is for {v}"],
    ),
}
# Kinds of things: the names of the field that says what it is, the kind of its value, its fields.
SUBJECTS_OF_TEXTS: list[tuple[str, str, str, list[str]]] = [
    ("[name|name|name|user|person|customer|first_name]", "name", "{v}",
     ["age", "city", "job", "color", "food", "pet", "score", "student", "friends"]),
    ("[item|product|name|article|thing]", "thing", "[The|A|This] {v}",
     ["price", "color", "quantity", "size", "city"]),
    ("[event|title|name]", "event", "[The|A|Our] {v}", ["day", "city", "people", "price"]),
]  # fmt: skip

# Tools: name, description, parameters with the kind of their values, and what a user says.
TOOLS: list[tuple[str, str, dict[str, str], dict[str, list[str]]]] = [
    ("[get_|fetch_|check_|current_|get_current_|]weather", "the [current |]weather [in|for|of] a "
        "city",
     {"[city|location|place|town]": "city"},
     {"noun": ["the [|current ]weather [in|for|at] {0}", "the temperature in {0}"],
      "clause": ["[how|what] the weather [is|is like|will be] in {0}", "if it [rains|snows] in "
      "{0}"],
      "question": ["[what is|what's|how is|how's] the weather [|like ]in {0}", "how "
      "[warm|cold|hot] is "
                   "it in {0}", "[is it|will it be] [warm|cold|sunny|windy] in {0}"]}),
    ("[get_|current_|get_local_|]time", "the [current |local ]time in a city",
     {"[city|location|place]": "city"},
     {"noun": ["the [|current |local ]time in {0}"], "clause": ["[what time|how late] it is in "
         "{0}"],
      "question": ["what time is it in {0}", "how late is it in {0}"]}),
    ("[get_|today_|current_|]date", "today's date", {},
     {"noun": ["[today's date|the date|the date of today]"], "clause": ["what day it is today"],
      "question": ["what [day|date] is it[| today]", "what is [the date|today's date]"]}),
    ("[add|sum|plus|add_numbers|addition]", "the sum of two numbers", {"[a|x|first|left]": "number",
     "[b|y|second|right]": "number"}, CORES["add"]),
    ("[subtract|minus|difference]", "the difference of two numbers",
     {"[a|x|first|left]": "number", "[b|y|second|right]": "number"},
     {"do": ["subtract {1} from {0}", "take {1} away from {0}"], "noun": ["the difference of {0} "
         "and "
      "{1}", "{0} [minus|-] {1}"], "question": ["what is {0} [minus|-] "
      "{1}"], "bare": ["{0} - {1}"]}),
    ("[multiply|times|product|mul]", "the product of two numbers",
     {"[a|x|first|left]": "number", "[b|y|second|right]": "number"},
     {"do": ["multiply {0} [by|with|and] {1}"], "noun": ["the product of {0} and {1}", "{0} "
         "[times|*|x] "
      "{1}"], "question": ["[what|how much] is {0} [times|*|x|multiplied by] "
      "{1}"], "bare": ["{0} * {1}"]}),
    ("[divide|division|div]", "one number divided by another",
     {"[a|x|first|left]": "number", "[b|y|second|right]": "number"},
     {"do": ["divide {0} by {1}"], "noun": ["{0} [divided by|/] {1}"],
      "question": ["what is {0} [divided by|/] {1}"], "bare": ["{0} / {1}"]}),
    ("[calculate|calculator|evaluate|calc|math]", "the value of an expression",
     {"[expression|formula|input]": "expression"},
     {"do": ["[calculate|compute|evaluate|solve|work out] {0}"], "noun": ["{0}", "the "
         "[value|result] of "
      "{0}"], "clause": ["what {0} is"], "question": ["[what|how much] is "
      "{0}"], "bare": ["{0}[| =]"]}),
    ("[lookup|look_up|find|find_person|get_contact|get_person|find_user]", "[what is known|the "
        "entry|the "
     "data] about a person", {"[name|person|user]": "name"},
     {"do": ["[look up|find|search for|get] {0}", "[look up|find] the [entry|contact] of {0}"],
      "clause": ["who {0} is"], "noun": ["[all|everything] about {0}", "the [entry|contact] of "
      "{0}"],
      "question": ["who is {0}", "what do [you|we] know about {0}"]}),
    ("[get_|find_|check_|]price", "the price of an item", {"[item|product|article]": "thing"},
     {"noun": ["the price of [a|the] {0}"], "clause": ["[how much|what] [a|the] {0} costs"],
      "question": ["[how much|what] does [a|the] {0} cost", "how expensive is [a|the] {0}"]}),
    ("[search|web_search|search_web|google]", "pages about [a topic|something]",
     {"[query|q|text|topic]": "topic"},
     {"do": ["[search|search the web|look|google] for {0}", "find [pages|news] about {0}"],
      "noun": ["[news|pages|information] about {0}"], "question": ["what is new about {0}"]}),
]  # fmt: skip

TOOLS += [
    ("[translate|translate_text|translation]", "a text in another language",
     {"text": "quoted", "[language|target|to]": "language"},
     {"do": ['[translate|put] "{0}" [to|into] {1}', 'say "{0}" in {1}'],
      "noun": ['the {1} [word|translation] [for|of] "{0}"'], "question": ['what is "{0}" in {1}']}),
    ("[send_message|message|send_text|send_mail]", "[a message to somebody|a note to a person]",
     {"[to|recipient|name]": "name", "[text|message|body]": "quoted"},
     {"do": ['send "{1}" to {0}', 'write {0}: "{1}"', 'tell {0} "{1}"', 'send {0} the message '
         '"{1}"']}),
    ("[set_timer|timer|start_timer]", "a timer for some minutes", {"minutes": "int"},
     {"do": ["[set|start] a timer for {0} minutes", "[wake|call] me in {0} minutes"],
      "noun": ["a timer [for|of] {0} minutes"]}),
    ("[play_|start_|]music", "music by [a singer|somebody]", {"[artist|singer|name]": "name"},
     {"do": ["play [music|a song|something] [by|from|of] {0}"], "noun": ["[music|a song] by {0}"]}),
    ("[convert_|exchange_|]currency", "an amount of money in another currency",
     {"amount": "int", "[from|source|from_currency]": "currency", "[to|target|"
         "to_currency]": "currency"},
     {"do": ["[convert|change|exchange] {0} {1} [to|into] {2}"], "noun": ["{0} {1} in {2}"],
      "question": ["how [much|many {2}] [is|are] {0} {1} in {2}"]}),
    ("[book_|find_|search_]flight", "a flight between two cities",
     {"[from|origin|start]": "city", "[to|destination]": "city", "[day|date]": "day"},
     {"do": ["[book|find] a flight from {0} to {1} on {2}", "fly me from {0} to {1} on {2}"],
      "noun": ["a [flight|ticket] from {0} to {1} on {2}"]}),
    ("[get_|compute_|]distance", "the distance between two cities",
     {"[from|origin|a]": "city", "[to|destination|b]": "city"},
     {"noun": ["the distance [from {0} to {1}|between {0} and {1}]"], "clause": ["how far {1} is "
         "from "
      "{0}"], "question": ["how far is it from {0} to {1}"]}),
    ("[create|add|new|make]_event", "an event in the calendar",
     {"[title|name|event]": "event", "[day|date]": "day"},
     {"do": ["[add|create|plan] [a|the] {0} on {1}", "put [a|the] {0} on {1} into my calendar"],
      "noun": ["a {0} on {1} in my calendar"]}),
    ("[set_|change_]light[|s]", "the color of the light in a room",
     {"[room|place]": "room", "color": "color"},
     {"do": ["[make|turn|set] the light in the {0} {1}", "set the {0} light to {1}"],
      "noun": ["{1} light in the {0}"]}),
    ("[random_number|random|roll_dice|dice]", "a random number up to a limit", {"[limit|max|"
        "sides]": "int"},
     {"do": ["[roll a dice with {0} sides|pick a random number up to {0}]"],
      "noun": ["a random number [up to|below] {0}"]}),
    ("[get|find|load]_[user|order|customer|ticket]", "a record with a number",
     {"[id|number]": "int"},
     {"do": ["[get|find|load|show me] [number|record|the record] {0}"], "noun": ["the record "
         "[|with the "
      "number ]{0}", "record [|number ]{0}"], "question": ["what is in record {0}"]}),
    ("[read|open|load]_file", "the content of a file", {"[path|file|name|filename]": "file"},
     {"do": ["[read|open|load|show me] [|the file ]{0}"], "noun": ["the content of {0}"],
      "clause": ["what is in {0}"], "question": ["what [is in|does] [|the file ]{0}[| say]"]}),
]  # fmt: skip
# A tool for anything: {w} is a noun that its name, its description and the question share.
ANY_TOOL = (
    "[get|find|fetch|query|read|show]_{w}", "the {w} of [a|an] {p}",
    {"noun": ["the {w} [of|for] {0}", "{0}'s {w}"], "clause": ["what the {w} of {0} "
        "is", "[what|which] "
     "{w} {0} has"], "question": ["what is the {w} [of|for] {0}", "what is {0}'s {w}", "[which|"
     "what] {w} "
     "does {0} have"], "do": ["[look up|find|get|show me|check] the {w} [of|for] {0}"],
     "bare": ["{w} [of|for] {0}[|?]"]},
)  # fmt: skip
RESULTS = [  # of a tool, in words
    "[sunny|cloudy|rainy|windy|warm and dry|cold and wet|18 degrees and sunny|light rain, 12 "
    "degrees]",
    "[done|ok|success|sent|saved|booked|not found|true|false|yes|no|nothing|open|closed]",
]

# Phrasings that training never sees: only the evaluation asks with them.
NEW_FRAMES: dict[str, list[str]] = {
    "add": [
        "Hey there, any idea what {0} + {1} comes out at?",
        "{0} + {1}, what do we get",
        "Let us see if you can handle {0} plus {1}",
        "My son cannot do {0} plus {1}. Can you?",
        "if you put {1} on top of {0}, what is the total?",
        "There were {0} birds, then {1} more birds came. How many birds is that now?",
        "Yo, {0} and {1}, sum it up for me real quick",
        "I keep getting {0} + {1} wrong. What should it be?",
    ],
    "sort": [
        "Would you mind sorting {0} for me?",
        "Here are my numbers: {0}. Sort please!",
        "Let's get these into ascending order: {0}",
        "These are all mixed up: {0}. Could you order them, lowest first?",
        "smallest number first please: {0}",
        "Rearrange {0} so that the numbers go up",
    ],
    "sort down": [
        "Start with the largest and end with the smallest: {0}",
        "I want {0} from the biggest down to the smallest one",
        "highest score first please: {0}",
        "Can these be listed in descending order? {0}",
    ],
    "sort words": [
        "My teacher wants these in alphabetical order, can you help? {0}",
        "Which of these comes first in the alphabet, and then which? Sort: {0}",
        "How would a dictionary order these words: {0}",
        "would be great to have {0} in alphabetical order",
    ],
    "reverse word": [
        "I wonder how {0} looks backwards",
        "Take {0} and turn it backwards",
        "Put the letters of {0} in the opposite order",
        "If I read {0} in a mirror, from right to left, what do I read?",
        "can u reverse {0} 4 me",
        "Start at the end of {0} and spell it to the front",
        "My name is {0}. What is my name backwards?",
        'The word is "{0}". Now in reverse, please.',
    ],
    "reverse list": [
        "Would you reverse the list {0}?",
        "Show me this list in reverse: {0}",
        "Last one first, first one last: {0}",
        "I need these the other way round: {0}",
        "What would {0} be if the list was reversed?",
    ],
    "count items": [
        "Tell me how many items this list has: {0}",
        "Would you count these for me: {0}",
        "I packed {0}. How many things did I pack?",
        "My shopping list is {0}. How many items do I have to buy?",
        "is this a long list? count it: {0}",
    ],
    "count same": [
        "I am looking for {1}. How many times do I find it here: {0}",
        "How frequently can {1} be found in this list: {0}",
        "{0}. And how many times did I say {1}?",
    ],
    "count plural": [
        "In my garden there are {0}. How many {1}s did you find?",
        "Number of {1}s in this list: {0}",
    ],
    "count letters": [
        "Do you know how many letters {0} has?",
        "Tell me how many letters are in {0}",
        "My word is {0}. How many letters is that?",
        "{0} has how many letters?",
        "I have to write {0} into boxes, one letter a box. How many letters are there?",
    ],
    "count letter": [
        "I bet you cannot say how many {1}'s are in {0}!",
        "Look at the word {0}. How many times do you see the letter {1}?",
        "In {0}, how often is there the letter {1}?",
    ],
    "count to": [
        "My daughter learns to count. Show her how to count to {1}",
        "we play hide and seek: count to {1}!",
        "Begin at {0} and count until you reach {1}",
    ],
    "count down": [
        "The rocket starts soon! Count down from {0}",
        "Do a countdown for us, from {0} please",
        "Begin at {0} and count backwards",
    ],
    "copy": [
        "Be my parrot: {0}",
        "Just say the following back: {0}",
        "I say, you repeat: {0}",
        "Please type exactly what I type now: {0}",
        'What did I just say? Repeat it: "{0}"',
        "Your only job is to echo my input. Input: {0}",
    ],
    "story": [
        "Would you tell me a story about {0}?",
        "My kids want a story about {0}!",
        "It is late and I cannot sleep. Tell me something nice, a story about {0}",
        "Once upon a time... you know, a story with {0} please",
        "can u write a short story about {0}",
    ],
    "long story": ["We have a lot of time: a long story about {0}, please!"],
    "any story": ["I am in bed now. Tell me a story!", "Could we have one of your stories?"],
    "look up": [
        "I forgot the {w} of {0}, what was it?",
        "do you see {0} in there? which {w}?",
        "Which {w} should I write down for {0}?",
        "now please the one for {0}",
        "the {w} for {0} again please",
    ],
    "json": [
        "Read the text and put {1} into a JSON object",
        "I only want JSON back, and it should have {1}",
        "Hey, fill in {1} for me, JSON format please!",
        "My program needs JSON with {1} from this text",
    ],
    "tool": [
        "My friend asked about *, any idea?",
        "Before I go out: *?",
        "hey quick one... *, thanks",
    ],
}
