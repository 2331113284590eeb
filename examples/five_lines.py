"""Opens a session, makes one call with an OpenAI client, and rewards it; then it shows the verdict."""

import weir

with weir.session(task_id="greeting") as s:
    reply = s.openai().chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "value of c?"}]
    )
    s.reward(float(reply.choices[0].message.content == "7"))
print(reply.choices[0].message.content, s.verdict)
