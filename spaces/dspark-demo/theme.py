"""Gradio's own components in the colours of `style.css`, with the fonts of the visitor's system."""

import gradio as gr


FONTS = ("ui-sans-serif", "system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")
COLOURS = {  # light, dark
    "ink": ("#1b1f24", "#e8ebef"),
    "quiet": ("#57606a", "#a2abb5"),
    "line": ("#d8dee4", "#343b44"),
    "page": ("#ffffff", "#111418"),
    "panel": ("#f6f8fa", "#191d23"),
    "accent": ("#0b6b5b", "#5cc7ae"),
    "on_accent": ("#ffffff", "#0d1512"),
    "accent_hover": ("#095a4d", "#74d3bd"),
}
PARTS = {
    "body_background_fill": "page",
    "body_text_color": "ink",
    "body_text_color_subdued": "quiet",
    "background_fill_primary": "page",
    "background_fill_secondary": "panel",
    "block_background_fill": "page",
    "block_border_color": "line",
    "block_info_text_color": "quiet",
    "block_label_text_color": "ink",
    "block_title_text_color": "ink",
    "border_color_primary": "line",
    "border_color_accent": "accent",
    "input_background_fill": "page",
    "input_border_color": "line",
    "input_border_color_focus": "accent",
    "input_placeholder_color": "quiet",
    "button_primary_background_fill": "accent",
    "button_primary_background_fill_hover": "accent_hover",
    "button_primary_border_color": "accent",
    "button_primary_border_color_hover": "accent",
    "button_primary_text_color": "on_accent",
    "button_secondary_background_fill": "panel",
    "button_secondary_background_fill_hover": "line",
    "button_secondary_border_color": "line",
    "button_secondary_border_color_hover": "line",
    "button_secondary_text_color": "ink",
    "slider_color": "accent",
    "checkbox_background_color_selected": "accent",
    "checkbox_border_color_selected": "accent",
    "checkbox_label_background_fill": "page",
    "checkbox_label_background_fill_selected": "panel",
    "checkbox_label_text_color": "ink",
    "checkbox_label_text_color_selected": "ink",
    "checkbox_label_border_color": "line",
    "link_text_color": "accent",
}


def page_theme() -> gr.themes.Base:
    values = {}
    for name, colour in PARTS.items():
        values[name], values[f"{name}_dark"] = COLOURS[colour]
    return gr.themes.Base(font=FONTS, radius_size="sm", spacing_size="sm").set(
        block_border_width="0px", block_shadow="none", block_padding="0px", input_border_width="1px", **values
    )
