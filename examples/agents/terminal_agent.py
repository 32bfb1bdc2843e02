#!/usr/bin/env python3
"""The terminal agent in Python, standard library only: same loop, same tool, same environment as terminal_agent.cpp.

Inside a sandbox are the host's /usr, so its python3, and what the job mounts; started from the root of the tree:
    temper run configs/smoke.yaml --set 'scaffold.command=["python3", "/opt/agents/terminal_agent.py"]' \
                                  --set 'sandbox.mounts=[{source: examples/agents, target: /opt/agents}]'
"""
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request

SHELL_TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a shell command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(messages):
    """One model call. Returns the message, or None when the rollout's turns are used up."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        data=json.dumps({"model": "policy", "messages": messages, "tools": [SHELL_TOOL]}).encode(),
        headers={"Content-Type": "application/json", "Authorization": "Bearer " + os.environ.get("OPENAI_API_KEY", "")},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        text = error.read().decode(errors="replace")
        if error.code == 400 and "rollout_limit" in text:
            return None
        raise SystemExit(f"terminal_agent: HTTP {error.code}: {text[:300]}")


def run_shell(command):
    argv = [os.environ["TEMPER_TOOL_EXEC"], "sh", "-c", command]
    env = {name: value for name, value in os.environ.items() if name != "OPENAI_API_KEY"}
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env)
    return done.stdout[:2000].decode(errors="replace").rstrip("\n")


def main():
    # What a policy says is run: only where it can break nothing.
    if not os.environ.get("TEMPER_TOOL_EXEC"):
        sys.exit("terminal_agent.py: TEMPER_TOOL_EXEC is not set: it runs a policy's commands in Temper's sandbox only")
    blind = "--blind" in sys.argv[1:]
    with open(os.environ["TEMPER_TASK_FILE"]) as file:
        messages = [{"role": "user", "content": json.load(file)["instruction"]}]
    for _ in range(32):
        message = ask(messages)
        if message is None:
            return
        messages.append(message)
        calls = message.get("tool_calls") or []
        if not calls:
            return
        for call in calls:
            try:
                known = call["function"]["name"] == "shell"
                output = run_shell(json.loads(call["function"]["arguments"])["command"]) if known else "unknown tool"
            except (ValueError, KeyError, TypeError):
                output = "bad arguments"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "" if blind else output})


if __name__ == "__main__":
    main()
