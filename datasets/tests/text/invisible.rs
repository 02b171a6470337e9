//! Invisible characters: which are taken out where that is asked for, and that words and signs stay whole.

use deepspec_datasets::conversation::{Invisible, strip_invisible};

#[test]
fn words_emoji_and_flags_stay_as_they_are() {
    for text in [
        // Persian: a non-joiner inside words.
        "می\u{200c}خواهم کتاب\u{200c}ها را بخوانم",
        // Hindi and Malayalam: joiners and non-joiners.
        "क्\u{200d}ष और ക്\u{200c}ഷ",
        // A family of three, a woman astronaut, a heart with a variation selector.
        "👨\u{200d}👩\u{200d}👧 👩\u{200d}🚀 ❤\u{fe0f}",
        // The flag of Scotland, spelled in tag characters.
        "🏴\u{e0067}\u{e0062}\u{e0073}\u{e0063}\u{e0074}\u{e007f}",
        // A soft hyphen, a word joiner, a narrow space.
        "Donau\u{ad}dampf 10\u{2060}% 1\u{202f}000",
        "plain",
        "",
    ] {
        assert_eq!(strip_invisible(text), (text.into(), Invisible::default()), "{text}");
    }
}

#[test]
fn bidirectional_controls_and_zero_width_spaces_are_taken_out_and_counted() {
    let (text, found) = strip_invisible("a\u{200b}\u{202e}b\u{2066}\u{feff}é\u{200e}\u{61c}\n");
    assert_eq!(text, "abé\n");
    assert_eq!(found, Invisible { bidi_controls: 4, zero_width_spaces: 2 });
    // Around what stays.
    let (text, found) = strip_invisible("\u{202b}می\u{200c}خواهم\u{202c}");
    assert_eq!(text, "می\u{200c}خواهم");
    assert_eq!(found, Invisible { bidi_controls: 2, zero_width_spaces: 0 });
    let (text, found) = strip_invisible("\u{feff}👩\u{200d}🚀\u{200b}");
    assert_eq!((text.as_ref(), found), ("👩\u{200d}🚀", Invisible { bidi_controls: 0, zero_width_spaces: 2 }));
}
