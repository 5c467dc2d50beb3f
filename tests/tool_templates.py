"""Chat templates that show tools, calls and results as three families' own do."""

from __future__ import annotations

_TEXT = (
    "{% macro text(c) %}{% if c is string %}{{ c }}{% else %}"
    "{% for p in c %}{{ p.text }}{% endfor %}{% endif %}{% endmacro %}"
)
HERMES = (
    _TEXT + "{% if tools %}<|im_start|>system\n<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}\n"
    "</tools><|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ text(m.content) }}\n</tool_response>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ text(m.content) }}"
    "{% for c in m.tool_calls or [] %}{% if not loop.first %}\n{% endif %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    _TEXT + "{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and loop.last or tools and loop.first %}[AVAILABLE_TOOLS]"
    "{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ text(m.content) }}[/INST]"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9') }}{% endif %}"
    '[TOOL_RESULTS]{"content": "{{ text(m.content) }}"}[/TOOL_RESULTS]'
    "{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    '{{ "]" if loop.last else ", " }}{% endfor %}</s>'
    "{% else %}{{ text(m.content) }}</s>{% endif %}{% endfor %}"
)
LLAMA = (
    _TEXT + "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}"
    "<|im_end|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ text(m.content) }}{% endif %}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
