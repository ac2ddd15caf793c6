"""The ways to ask for each task, and a few that only the evaluation uses.

Generated from notebooks/A_embedded_model.ipynb: edit there.
"""

from __future__ import annotations

FRAMES: dict[str, list[str]] = {}
FRAMES["add"] = [
    "[What is|What's|How much is|What does it make:|Tell me|Calculate|Compute|Work out|Solve|"
    "Find] {0} + {1}[?||.]",
    "[What is|What's|How much is|Calculate|Tell me|I need] {0} plus {1}[?|]",
    "{0} + {1}[| =| = ?|?|=]",
    "{0}+{1}[|=|=?|?]",
    "{0} plus {1}[|?| is| equals| equals what?]",
    "@[add|sum|add up|add together] [|the numbers |the two numbers |these: |up ]{0} [and|to|"
    "with|plus] {1}[.||?]",
    "@[compute|calculate|find|give me|tell me|work out] [the sum of|the total of] {0} [and|"
    "plus|with] {1}[.||?]",
    "What is the [sum|total|result] of [|adding ]{0} [and|plus|+|to] {1}[?|]",
    "What [do you get|do I get|happens] [when you|if you|if I] add {0} [and|to] {1}[?|]",
    "[I have|If I have|There are|She has|Tom has|We have] {0} [apples|coins|books|cats|points|"
    "stones|eggs] and [get|find|buy|add|receive] {1} more[. How many|, how many] [is that|are "
    "there now|in total|do I have now|altogether|is it in all][?|]",
    "[Can you|Could you|Would you|Do you know how to] [add|sum] {0} and {1}[?|]",
    "[Sum|Addition|Add|Total|Math question]: {0} [+|and|,|plus] {1}[|?]",
    "[How many|How much] [is|are|do] {0} and {1} [together|in total|make|in all|combined][?|]",
    "{0} and {1} [make what|is how much|together|added together][?|]",
    "[Help me with|I need help with|My homework is|My homework says|Quick question:|Quick sum:|"
    "A sum for you:|Easy one:|The exercise is] {0} [+|plus] {1}[|.|?|, please| please]",
    "[What would|What will|What does|How much does|How much would] {0} [+|plus|and] {1} [be|"
    "make|give|give me|equal|come to][?|]",
]
FRAMES["sort"] = [
    "@[sort|order|arrange|rank|sort out] [these|the following|this list of|the|my|these few] "
    "[numbers|values|integers|scores|] [in ascending order|from smallest to largest|from low "
    "to high|in increasing order|smallest first|] [:|: ]{0}[|.]",
    "@[sort|order|arrange|put in order]: {0}[|.]",
    "@[sort|order|arrange] {0}[|.|?| for me| please| from smallest to largest| in ascending order]",
    "@[sort|order] [this|these|this list|the list|the following][:|: ]{0}",
    "@put [these|the|these numbers|the numbers|the following numbers] in [order|ascending "
    "order|the right order|increasing order][:|: | - ]{0}",
    "@put {0} in [order|ascending order][.|]",
    "[What is|Give me|Show me|Write] {0} [sorted|in order|in sorted order|from smallest to "
    "largest][?|]",
    "[Which order|In which order] do these numbers go, smallest first: {0}",
    "[Sorted list|Ascending order|Numbers to sort|Sort|Sort this|Sort these] [:|: |please: ]{0}",
    "I have [these numbers|the numbers|some numbers]: {0}. [Sort them|Please sort them|Put "
    "them in order|Can you sort them?|Order them]",
    "{0}\n[Sort these|Sort these numbers|Sort them please|Put these in order][.|]",
]
FRAMES["sort down"] = [
    "@[sort|order|arrange|rank] [these|the following|the|my] [numbers|values|scores|] [in "
    "descending order|from largest to smallest|from high to low|in decreasing order|largest "
    "first|biggest first|in reverse order of size]: {0}[|.]",
    "@[sort|order|arrange] {0} [in descending order|from largest to smallest|from biggest to "
    "smallest|largest first|from high to low|downwards][.|]",
    "@put [these|the|these numbers] in [descending|decreasing] order: {0}",
    "[Descending order|Largest first|Sort descending|From big to small]: {0}",
]
FRAMES["sort words"] = [
    "@[sort|order|arrange] [these|the following|the|my] [words|names|items|] [alphabetically|"
    "in alphabetical order|from A to Z|by the alphabet|]: {0}[|.]",
    "@[sort|order|alphabetize] {0}[|.| alphabetically| in alphabetical order| from A to Z]",
    "@put [these|these words|the words] in alphabetical order: {0}",
    "[Alphabetical order|Sort|Sort these|Sort alphabetically|Words to sort]: {0}",
]

FRAMES["reverse word"] = [
    "@[reverse|flip|turn around|spell backwards|write backwards|invert] [|the word |the word: |"
    "this word: |the letters of |the letters in |the text |the string ]{0}[|.|?]",
    '@[reverse|flip] [|the word |this: |the string ]"{0}"[|.|?]',
    "@[spell|write|say|type] [|the word ]{0} [backwards|in reverse|backward|the other way "
    "round|from back to front|from right to left|reversed][|.|?]",
    '@[spell|write|say] [|the word ]"{0}" [backwards|in reverse|backward][|.|?]',
    "[What is|What's|How do you spell|How do you write|What does] [|the word ][{0}|\"{0}\"|'{0}']"
    " [backwards|reversed|in reverse|spelled backwards|written backwards][?|]",
    "[Reverse|Backwards|Reversed|Word to reverse|Reverse this word|Reverse word]: {0}",
    "{0} [backwards|reversed|in reverse|spelled backwards][|?|, please]",
    "@[give me|show me|tell me|return|print] [|the word |the letters of ]{0} [backwards|in "
    "reverse|reversed|in reverse order][.||?]",
    '[How does|How would] [|the word ][{0}|"{0}"] [look|read|sound] [backwards|reversed|in '
    "reverse|from right to left][?|]",
    "[I want|I need|I would like] [the word|the letters of|to see|] {0} [backwards|reversed|in "
    "reverse][.|]",
]
FRAMES["reverse list"] = [
    "@[reverse|flip|turn around|invert] [this list|the list|the following list|the order of|"
    "the order of this list|the following|these items|these|the items]: {0}[|.]",
    "@[reverse|flip] [|the list ]{0}[|.|?]",
    "@[say|write|list|give me|repeat] [these|the following|this list|these items] [backwards|"
    "in reverse order|in reverse|from last to first|in the opposite order]: {0}[|.]",
    "[What is|What would be] [this list|the list] [backwards|in reverse|reversed]: {0}[|?]",
    "[Reverse|Backwards|Reverse order|Reverse list|Last to first]: {0}",
    "{0}\n[Reverse this list|Now backwards|Reverse the list|Reverse them][.|]",
]
FRAMES["count items"] = [
    "How many [items|things|entries|elements|words|numbers|names|] [are|are there] [in this "
    "list|in the list|here|in the following list|in total|listed here][:|: ]{0}[|?|.]",
    "How many [items|things|entries|elements] does this list have: {0}[|?]",
    "How many [items|things|entries] are in {0}?",
    "@count [these|the items|the things|the items in this list|the entries|the elements|the "
    "words|how many there are|them]: {0}[|.]",
    "[Count|Count these|How many|How many are there|How many items|Number of items|Length of "
    "the list]: {0}[|?]",
    "[I have|I bought|There is|I see|My list is] {0}. How many [things|items] [is that|are "
    "there|do I have|are in my list][?|]",
    "{0}\n[How many is that|How many items|Count them|How many are there][?|]",
]
FRAMES["count same"] = [
    "How many times [does|did] {1} [appear|occur|come up|show up] in [|this list|the list|the "
    "following|this text]: {0}[|?]",
    "How [often|many times] is {1} in [this list|the list|the following list]: {0}[|?]",
    "@count [the word|how often you see|every|the number of times you see|] {1} in: {0}[|.]",
    "[In this list|In the list], how many times [do you see|is there|does it say] {1}: {0}[|?]",
    "How many of these are {1}: {0}[|?]",
]
FRAMES["count plural"] = [
    "How many {1}s are [in|there|there in|in this list|in the list|here]: {0}[|?]",
    "[I have|I see|There are|I bought] {0}. How many {1}s [is that|are there|do I have|do you "
    "see][?|]",
    "How many {1}s do [you see|I have|you count] [in|here]: {0}[|?]",
    "@count the {1}s [in|in this list|here]: {0}[|.]",
]

FRAMES["count letters"] = [
    'How many letters [are|are there] in [|the word ][{0}|"{0}"][?|]',
    'How many letters does [|the word ][{0}|"{0}"] have[?|]',
    '@count the letters [in|of] [|the word |the word: ][{0}|"{0}"][.||?]',
    '[How long is|What is the length of] the word [{0}|"{0}"][?|]',
    "[Letters in|Number of letters in|Count letters|Count the letters]: {0}",
]
FRAMES["count letter"] = [
    "How many [times does|times is] the letter {1} [appear|found|occur] in [|the word ][{0}|"
    '"{0}"][?|]',
    'How many [|letters ]{1}[\'s|s|] are [|there ]in [|the word ][{0}|"{0}"][?|]',
    "How many [letter {1}|{1}'s] does [|the word ]{0} have[?|]",
    "@count the [letter {1}|{1}'s|letters {1}] in [|the word ]{0}[.||?]",
]
FRAMES["copy"] = [
    "@[repeat|say|copy|echo|write|type|print|output] [this|the following|after me|exactly this|"
    "this text|these words|the following text|it back|this back to me|what I say|exactly]: {0}",
    "[Repeat|Say|Copy|Echo|Repeat after me|Say after me|Repeat this|Copy this|Print]: {0}",
    "[Repeat after me|Say after me|Copy this text|Repeat the following|Write this down|Repeat "
    "this sentence]:\n{0}",
    '@[repeat|say|copy|echo|print] "{0}"[|.]',
    "@[repeat|say|copy|echo] [the words|the text|the sentence|the following words|the phrase] "
    '"{0}"[|.]',
    "[Would you|Can you|Could you|Now] [repeat|say|copy|echo] [this|this for me|the following|"
    "after me]: {0}",
    "{0}\n[Repeat the text above|Repeat that|Copy the text above|Say that again][.|]",
]
FRAMES["story"] = [
    "@[tell me|tell|write|write me|make up|give me|invent|tell us|create] a [||short |little |"
    "nice |bedtime |new |funny ][story|story|tale|fairy tale] [about|about|about|of|with] {0}[|"
    ".|?|!]",
    "[I want|I would like|I'd like|I need|I want to hear|Let me hear|How about|Do you know|Do "
    "you have] a [|short |little ][story|tale] [about|with|of] {0}[|.|?|!| please]",
    "[Story|A story|Story time|Short story|One story]: {0}[|.]",
    "[A |]story about {0}[| please|.]",
    "[Can you tell|Could you tell|Will you tell] [|me |us ]a story about {0}[?|]",
]
FRAMES["long story"] = [
    "@[tell me|write|write me|make up|give me] a [long|very long|longer|really long] [story|"
    "tale] [about|of|with] {0}[|.|?|!]",
    "[I want|I would like|Long story|A long story]: a long story about {0}[|.]",
    "[I want|I would like] a long story about {0}[|.]",
]
FRAMES["any story"] = [
    "@[tell me|tell|write|make up|give me|read me] a [|short |little |nice |bedtime ][story|"
    "tale][|.|?|!| please]",
    "[A story please|Story time|Story|I want a story|Another story|One more story|Tell me "
    "another story][|.|!]",
]

# Phrasings that training never sees: only the evaluation asks with them.
NEW_FRAMES: dict[str, list[str]] = {
    "add": [
        "Hey there, any idea what {0} + {1} comes out at?",
        "{0} + {1}, what do we get",
        "Let us see if you can handle {0} plus {1}",
    ],
    "sort": [
        "Would you mind sorting {0} for me?",
        "Here are my numbers: {0}. Sort please!",
        "Let's get these into ascending order: {0}",
    ],
    "reverse word": [
        "I wonder how {0} looks backwards",
        "Take {0} and turn it backwards",
        "Put the letters of {0} in the opposite order",
    ],
    "reverse list": [
        "Would you reverse the list {0}?",
        "Show me this list in reverse: {0}",
    ],
    "count items": [
        "Tell me how many items this list has: {0}",
        "Would you count these for me: {0}",
    ],
    "count letters": [
        "Do you know how many letters {0} has?",
        "Tell me how many letters are in {0}",
    ],
    "copy": [
        "Be my parrot: {0}",
        "Just say the following back: {0}",
        "I say, you repeat: {0}",
    ],
    "story": [
        "Would you tell me a story about {0}?",
        "My kids want a story about {0}!",
    ],
}
