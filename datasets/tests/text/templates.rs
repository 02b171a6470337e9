//! Chat templates in the style of several model families, written for these tests, and the template engine itself.

use deepspec_datasets::Error;
use deepspec_datasets::chat_template::ChatTemplate;
use deepspec_datasets::conversation::{Message, Role};

/// ChatML with a default system prompt.
pub(crate) const CHATML: &str = "\
{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}
        {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' ~ m.role ~ '\\n' ~ m.content ~ '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Thinking blocks as Qwen3: answers of the past lose theirs, the last answer has one, and without thinking the
/// generation prompt gives an empty one.
pub(crate) const THINKING: &str = "\
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last_user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.last_user %}
        {{- '<think>\\n' + (m.reasoning_content or '').strip('\\n') + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- m.content.lstrip('\\n') }}
    {%- if m.tool_calls %}{% for call in m.tool_calls %}{{ '\\n' + (call.function | tojson) }}{% endfor %}{% endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}";

/// Headers as Llama 3, content trimmed.
pub(crate) const HEADERS: &str = "\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}";

/// Turns as Gemma: the model's role is `model`, content is trimmed, a system message is refused.
pub(crate) const TURNS: &str = "\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{% for m in messages %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";

pub(crate) fn user(content: &str) -> Message {
    Message::new(Role::User, content)
}

pub(crate) fn assistant(content: &str) -> Message {
    Message::new(Role::Assistant, content)
}

pub(crate) fn system(content: &str) -> Message {
    Message::new(Role::System, content)
}

fn render(source: &str, messages: &[Message]) -> Result<String, Error> {
    ChatTemplate::new(source, "<bos>", "<eos>")?.render(messages, None, true, None)
}

/// The expected texts were printed by Jinja2 3.1 with the settings of transformers.
#[test]
fn families_render_as_written() {
    let chat = [user("hi"), assistant(" yes \n"), user("more")];
    assert_eq!(
        render(CHATML, &chat).unwrap(),
        "<|im_start|>system\nBe helpful.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n\
         <|im_start|>assistant\n yes \n<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    );
    let text = ChatTemplate::new(THINKING, "", "").unwrap().render(&chat, None, true, Some(false)).unwrap();
    assert_eq!(
        text,
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n yes \n<|im_end|>\n\
         <|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
    assert_eq!(
        render(HEADERS, &chat).unwrap(),
        "<bos><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\nyes<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nmore<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(
        render(TURNS, &chat).unwrap(),
        "<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyes<end_of_turn>\n\
         <start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n"
    );
}

#[test]
fn white_space_and_values_are_those_of_python() {
    let lines = "{% if true %}\n  a\n  {% endif %}\n{# note #}\nb\n";
    assert_eq!(render(lines, &[]).unwrap(), "  a\nb");
    assert_eq!(render("{{ true }} {{ none }} {{ 1.0 }} {{ tools }}", &[]).unwrap(), "True None 1.0 None");
    assert_eq!(render("{{ ' a,b '.strip().split(',')[::-1] | join('+') }}", &[]).unwrap(), "b+a");
    assert_eq!(render("{{ enable_thinking is defined }}", &[]).unwrap(), "False");
    assert_eq!(render("{{ {'a': '<é>'} | tojson }}", &[]).unwrap(), "{\"a\": \"<é>\"}");
    assert_eq!(render("{{ [1] | tojson(indent=1, separators=(',', ':')) }}", &[]).unwrap(), "[\n 1\n]");
    assert_eq!(render("{% for m in messages %}{{ m.name is defined }}{% endfor %}", &[user("x")]).unwrap(), "False");
}

#[test]
fn generation_marks_change_nothing() {
    let marked = "{% for m in messages %}\n  {%- generation -%}\n {{ m.content }} \n{% endgeneration %}\n{% endfor %}";
    let unmarked = "{% for m in messages %}\n  {%- if true -%}\n {{ m.content }} \n{% endif %}\n{% endfor %}";
    let chat = [user("{% generation %}"), user("{{ 7 * 7 }}")];
    assert_eq!(render(marked, &chat).unwrap(), render(unmarked, &chat).unwrap());
    assert!(render(marked, &chat).unwrap().contains("{{ 7 * 7 }}"), "braces in content are text");
    assert_eq!(render("{{ '{% x' }}{% if add_generation_prompt %}y{% endif %}", &[]).unwrap(), "{% xy");
}

#[test]
fn failures_say_whose_they_are() {
    assert!(matches!(render("{% if %}", &[]), Err(Error::TemplateSyntax { .. })));
    assert!(matches!(render("{{ messages[0].content.nope() }}", &[user("a")]), Err(Error::TemplateRender { .. })));
    match render(TURNS, &[system("s"), user("a")]) {
        Err(Error::TemplateRefused { message }) => assert_eq!(message, "no system role"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn endless_work_ends_with_an_error() {
    let source = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = b %}{% endfor %}{% endfor %}";
    assert!(matches!(render(source, &[]), Err(Error::TemplateRender { .. })));
    let recursive = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
    assert!(matches!(render(recursive, &[]), Err(Error::TemplateRender { .. })));
}

#[test]
fn dates_are_those_of_the_given_time() {
    let template = ChatTemplate::new("{{ strftime_now('%d %b %Y') }}", "", "").unwrap().with_time(1_735_689_599);
    assert_eq!(template.render(&[], None, false, None).unwrap(), "31 Dec 2024");
    let template = ChatTemplate::new("{{ strftime_now('%Q') }}", "", "").unwrap();
    assert!(matches!(template.render(&[], None, false, None), Err(Error::TemplateRender { .. })));
}

#[test]
fn tools_need_a_template_that_prints_them() {
    let mut call = assistant("");
    call.tool_calls = Some(serde_json::json!([{"function": {"name": "f", "arguments": {"x": 1, "y": 2.5}}}]));
    let chat = [user("a"), call];
    let template = ChatTemplate::new(CHATML, "", "").unwrap();
    let error = template.render(&chat, None, false, None).unwrap_err();
    assert!(matches!(error, Error::TemplateWithoutTools { what: "tool_calls" }));
    let tools = serde_json::json!([{"name": "f"}]);
    let error = template.render(&chat[..1], Some(&tools), false, None).unwrap_err();
    assert!(matches!(error, Error::TemplateWithoutTools { what: "tools" }));
    let text = ChatTemplate::new(THINKING, "", "").unwrap().render(&chat, None, false, None).unwrap();
    assert!(text.contains(r#"{"name": "f", "arguments": {"x": 1, "y": 2.5}}"#), "{text}");
}
