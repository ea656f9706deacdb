"""Chat templates that write tools, calls and reasoning as the published ones do, short."""

KIMI = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}"
    "{%- for message in messages -%}<|im_{{ message['role'] }}|>{{ message.get('name') or message['role'] }}"
    "<|im_middle|>"
    "{%- if message['role'] == 'assistant' and message.get('tool_calls') -%}"
    "{%- if message['reasoning_content'] -%}<think>{{ message['reasoning_content'] }}</think>{%- endif -%}"
    "{{ message['content'] }}<|tool_calls_section_begin|>{%- for call in message['tool_calls'] -%}"
    "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>{%- endfor -%}"
    "<|tool_calls_section_end|>"
    "{%- elif message['role'] == 'tool' -%}## Return of {{ message.tool_call_id }}\n{{ message['content'] }}"
    "{%- else -%}{{ message['content'] }}{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>"
    "{{ '<think></think>' if thinking is false else '<think>' }}{%- endif -%}"
)
KIMI_K25 = (
    "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{% if tools_ts_str is defined %}{{ tools_ts_str }}"
    "{% else %}{{ tools | tojson(separators=(',', ':')) }}{% endif %}<|im_end|>{%- endif -%}"
    "{%- for message in messages -%}<|im_{{ message['role'] }}|>{{ message.get('name') or message['role'] }}"
    "<|im_middle|>{%- if message['role'] == 'tool' -%}{{ '## Return of ' + message.tool_call_id + '\n' }}{%- endif -%}"
    "{%- if message['role'] == 'assistant' -%}<think>{{ message.get('reasoning_content', '') }}</think>{%- endif -%}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}{%- endif -%}"
    "{%- if message.get('tool_calls') -%}<|tool_calls_section_begin|>{%- for call in message['tool_calls'] -%}"
    "<|tool_call_begin|>{{ call['id'] }}<|tool_call_argument_begin|>"
    "{% if call['function']['arguments'] is string %}{{ call['function']['arguments'] }}"
    "{% else %}{{ call['function']['arguments'] | tojson }}{% endif %}<|tool_call_end|>{%- endfor -%}"
    "<|tool_calls_section_end|>{%- endif -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>"
    "{{ '<think></think>' if thinking is false else '<think>' }}{%- endif -%}"
)
DEEPSEEK_V31 = (
    "{% if tools %}## Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}{% endif %}"
    "{%- for message in messages -%}{%- if message['role'] == 'user' -%}{{ '<｜User｜>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' and message['tool_calls'] is defined -%}"
    "{{ '<｜Assistant｜></think>' + message['content'] + '<｜tool▁calls▁begin｜>' }}"
    "{%- for call in message['tool_calls'] -%}{{ '<｜tool▁call▁begin｜>' + call['function']['name'] + '<｜tool▁sep｜>'"
    " + call['function']['arguments'] + '<｜tool▁call▁end｜>' }}{%- endfor -%}"
    "{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif message['role'] == 'tool' -%}"
    "{{ '<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>' }}"
    "{%- else -%}{{ '<｜Assistant｜></think>' + message['content'] + '<｜end▁of▁sentence｜>' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt and messages[-1]['role'] == 'user' -%}"
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}{%- endif -%}"
)
DEEPSEEK_V31_WITHOUT_TOOLS = (
    "{% set ns = namespace(system='') %}{%- for m in messages if m['role'] == 'system' -%}"
    "{% set ns.system = ns.system + ('\\n\\n' if ns.system else '') + m['content'] %}{%- endfor -%}{{ ns.system }}"
    + DEEPSEEK_V31[DEEPSEEK_V31.index("{%- for message") :].replace(
        "{%- else -%}", "{%- elif message['role'] == 'assistant' -%}"
    )
)
"""As V3.1's own: of tools it writes the calls and their results alone."""
DEEPSEEK_V3 = (
    "{%- if tools -%}# Tools ```json{%- for tool in tools -%}{{ tool | tojson }}{%- endfor -%}{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' and message['tool_calls'] is defined -%}"
    "{{ message['content'] + '<｜tool▁calls▁begin｜>' }}{%- for call in message['tool_calls'] -%}"
    "{{ '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>' + call['function']['name'] + '\\n```json\\n' +"
    " call['function']['arguments'] | tojson + '\\n```<｜tool▁call▁end｜>' }}{%- endfor -%}{{ '<｜tool▁calls▁end｜>' }}"
    "{%- else -%}{{ '<｜' + message['role'] + '｜>' + message['content'] }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜>' }}{%- endif -%}"
)
GLM = (
    "[gMASK]<sop>{%- if tools -%}<|system|># Tools{%- for tool in tools -%}{{ tool | tojson(ensure_ascii=False) }}"
    "{%- endfor -%}{%- endif -%}{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}<|observation|><tool_response>{{ m.content }}</tool_response>"
    "{%- else -%}<|{{ m.role }}|>{%- if m.role == 'assistant' -%}<think>{{ m.reasoning_content or '' }}</think>"
    "{%- endif -%}{{ m.content }}{%- for tc in m.tool_calls or [] -%}<tool_call>{{ tc.function.name }}"
    "{%- for k, v in tc.function.arguments.items() -%}<arg_key>{{ k }}</arg_key><arg_value>"
    "{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>{%- endfor -%}</tool_call>"
    "{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{{ '</think>' if enable_thinking is false else '<think>' }}"
    "{%- endif -%}"
)
MISTRAL = (
    "{{ bos_token }}{%- if tools -%}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{%- endif -%}"
    "[MODEL_SETTINGS]{{ reasoning_effort or 'none' }}[/MODEL_SETTINGS]{%- for m in messages -%}"
    "{%- if m.role == 'tool' -%}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
    "{%- elif m.role == 'assistant' -%}{%- if m.reasoning_content -%}[THINK]{{ m.reasoning_content }}[/THINK]"
    "{%- endif -%}{{ m.content }}{%- for tc in m.tool_calls or [] -%}[TOOL_CALLS]{{ tc.function.name }}[ARGS]"
    "{{ tc.function.arguments if tc.function.arguments is string else tc.function.arguments | tojson }}{%- endfor -%}"
    "{{ eos_token }}{%- else -%}[INST]{{ m.content }}[/INST]{%- endif -%}{%- endfor -%}"
)
DEEPSEEK_R1 = (
    "{%- for m in messages -%}{{ '<｜' + m['role'] + '｜>' + m['content'] }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}"
)
DEEPSEEK_R1_CALLS = (
    "{% set ns = namespace(system='', first=true) %}{%- for m in messages if m['role'] == 'system' -%}"
    "{% set ns.system = ns.system + ('' if ns.first else '\\n\\n') + m['content'] %}{% set ns.first = false %}"
    "{%- endfor -%}{{ bos_token }}{{ ns.system }}"
    "{%- for m in messages -%}{%- if m['role'] == 'user' -%}{{ '<｜User｜>' + m['content'] }}"
    "{%- elif m['role'] == 'assistant' and m['content'] is none -%}{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' }}"
    "{%- for call in m['tool_calls'] -%}{{ '<｜tool▁call▁begin｜>' + call['type'] + '<｜tool▁sep｜>'"
    " + call['function']['name'] + '\\n```json\\n' + call['function']['arguments'] + '\\n```<｜tool▁call▁end｜>' }}"
    "{%- endfor -%}{{ '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}"
    "{%- elif m['role'] == 'assistant' -%}"
    "{{ '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{%- elif m['role'] == 'tool' -%}"
    "{{ '<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>' + m['content'] }}"
    "{{ '<｜tool▁output▁end｜><｜tool▁outputs▁end｜>' }}"
    "{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>\\n' }}{%- endif -%}"
)
"""As R1's own, and V3's but for the end: of tools it writes the calls and their results alone, and calls of messages
that say nothing."""
