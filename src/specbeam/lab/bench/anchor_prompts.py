"""Prompts of `bench anchors`: messages for chat models, and questions on a database for models that write SQL."""

MESSAGES = (
    "What should I see in Lisbon in two days?",
    "Explain in simple words how a vaccine works.",
    "Write a short poem about the first snow of the year.",
    "My bread does not rise. What are the usual reasons?",
    "Tom has 12 apples and gives a third of them to Anna. How many does he keep? Show the steps.",
    "Write a polite email that asks for two more weeks on a report.",
    "What is the difference between a virus and a bacterium?",
    "Give me five tips for learning to play chess.",
    "Summarise the story of Romeo and Juliet in three sentences.",
    "Write a Python function that counts the vowels in a text.",
    "Why is the sky blue, and why are sunsets red?",
    "Describe a day in the life of a lighthouse keeper.",
)

SCHEMA = """Database library:
authors(author_id, name, country, born)
books(book_id, title, author_id, year, pages, language)
members(member_id, name, city, joined)
loans(loan_id, book_id, member_id, lent_on, returned_on)
fines(fine_id, loan_id, amount, paid)"""

QUESTIONS = (
    "How many books are there in each language?",
    "What are the names of the members who live in Bergen and joined after 2020?",
    "List the titles of all books by authors from Norway, the newest first.",
    "Which member has borrowed the most books?",
    "What is the average number of pages of books published before 1950?",
    "Show the names of the authors who have written more than three books.",
    "Which books were never lent?",
    "What is the total amount of unpaid fines for each member?",
    "Find the titles of the books that are still lent, with the names of the members who have them.",
    "How many loans were made in each month of 2023?",
    "Which city has the most members?",
    "What are the five longest books, and who wrote them?",
)


def sql_prompt(question: str) -> str:
    """Return the prompt of a question on the database of `SCHEMA`: an example, the schema and the question."""
    example = "Question: How many authors are there?\nSQL: SELECT count(*) FROM authors;\n"
    return f"{SCHEMA}\n{example}Question: {question}\nSQL:"
