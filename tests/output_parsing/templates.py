"""The parts of real chat templates by which formats are detected; the rest is omitted."""

QWEN_2_5 = """{%- if tools %}{{- '# Tools' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- "<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>" }}
{%- endif %}
{%- for message in messages %}{{- message.content }}{%- endfor %}"""

QWEN_3 = (
    QWEN_2_5
    + """{%- if '</think>' in content %}{%- set reasoning = content.split('</think>')[0] %}{%- endif %}
{%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"""
)

QWEN_3_CODER = """{%- if tools %}{{- '<tool_call>\\n<function=example_function_name>' }}
{{- '\\n<parameter=example_parameter_1>' }}
{{- '\\n</parameter>\\n</function>\\n</tool_call>' }}{%- endif %}"""

HERMES_2_PRO = """{%- for tool in tools %}{{ tool.function.name }}{%- endfor %}
{{ 'For each function call return a json object inside <tool_call></tool_call> XML tags' }}"""

LLAMA_3_1 = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- "Environment: ipython\\n" }}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{%- if builtin_tools is defined %}{{- "<|python_tag|>" + tool_call.name + ".call(" }}{%- endif %}"""

LLAMA_3_2 = """{%- if tools is not none and not tools_in_user_message %}
{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.' }}
{{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{%- endif %}"""

LLAMA_4 = """{%- if tools %}{{- '<|python_start|>' }}{%- for call in message.tool_calls %}{{- call.name }}{%- endfor %}
{{- '<|python_end|>' }}{%- endif %}"""

OLMO_3 = """{%- if tools %}{{ '<functions>' + tools | tojson }}{% endif %}
{{ '<function_calls>' + calls + '</function_calls>' }}"""

MISTRAL_V3 = """{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- "[AVAILABLE_TOOLS] [" }}
{{- "[TOOL_CALLS] [" }}{%- for tool_call in message.tool_calls %}{{- tool_call.function|tojson }}{%- endfor %}"""

MISTRAL_V13 = """{%- if tools is defined %}{{- '[AVAILABLE_TOOLS]' + (tools| tojson) }}{%- endif %}
{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"""

MAGISTRAL = MISTRAL_V13 + "{{- '[THINK]' + chunk.thinking + '[/THINK]' }}"

DEEPSEEK_R1 = """{%- if message['tool_calls'] %}{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}{%- endif %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{% if add_generation_prompt %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"""

SMOLLM_2 = """{% for message in messages %}{{ message['role'] + '\\n' + message['content'] + '<|im_end|>'}}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

UNKNOWN_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}{{ '<call me>' }}"
