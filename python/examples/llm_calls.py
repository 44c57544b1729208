"""An API that allows 5 calls at a time and 100 calls in any minute, for all processes together."""

import asyncio

import leasehold

client = leasehold.Client()  # $LEASEHOLD_STORE, for example redis://localhost:6379
# Up to 5 calls start at once after a quiet time. They are a part of the 100, so 96 per minute start in the long run.
calls = client.semaphore("llm", 5, rate=(100, 60), burst=5, label="summaries")


async def complete(prompt: str) -> str:
    # Calls start in the order in which they were requested. After 30 s in the queue, a call raises leasehold.TimedOut.
    async with calls.guard(within=30):
        return await call_the_model(prompt)


async def call_the_model(prompt: str) -> str:
    await asyncio.sleep(0.05)  # the request
    return prompt.upper()


async def main() -> None:
    answers = await asyncio.gather(*(complete(f"prompt {number}") for number in range(12)))
    print(len(answers), "answers;", answers[0])


if __name__ == "__main__":
    asyncio.run(main())
