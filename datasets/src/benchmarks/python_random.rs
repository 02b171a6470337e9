//! The Mersenne Twister MT19937 as Python seeds and uses it, for shuffles that Python programs can repeat.

const SIZE: usize = 624;

/// Python's `random.Random(seed)`, as far as `shuffle` needs it.
#[derive(Clone)]
pub struct PythonRandom {
    state: [u32; SIZE],
    next: usize,
}

impl std::fmt::Debug for PythonRandom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PythonRandom").field("next", &self.next).finish_non_exhaustive()
    }
}

impl PythonRandom {
    /// Seeds by the 32-bit words of the number, lowest first, as Python does with an integer.
    pub fn new(seed: u64) -> Self {
        let words = [seed as u32, (seed >> 32) as u32];
        let key = if words[1] == 0 { &words[..1] } else { &words[..] };
        let mut state = [0_u32; SIZE];
        state[0] = 19_650_218;
        for i in 1..SIZE {
            state[i] = scramble(state[i - 1], 1_812_433_253).wrapping_add(i as u32);
        }
        let mut i = 1;
        for step in 0..SIZE {
            let j = step % key.len();
            state[i] = (state[i] ^ scramble(state[i - 1], 1_664_525)).wrapping_add(key[j]).wrapping_add(j as u32);
            i = next_index(&mut state, i);
        }
        for _ in 1..SIZE {
            state[i] = (state[i] ^ scramble(state[i - 1], 1_566_083_941)).wrapping_sub(i as u32);
            i = next_index(&mut state, i);
        }
        state[0] = 0x8000_0000;
        PythonRandom { state, next: SIZE }
    }

    /// Shuffles in place, with the same swaps as Python.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            let j = self.below(i as u64 + 1);
            items.swap(i, j as usize);
        }
    }

    /// A number from 0 up to but not `end`: bits are drawn until they fit.
    fn below(&mut self, end: u64) -> u64 {
        let bits = u64::BITS - end.leading_zeros();
        loop {
            let drawn = self.bits(bits);
            if drawn < end {
                return drawn;
            }
        }
    }

    /// Up to 64 random bits, low word first.
    fn bits(&mut self, count: u32) -> u64 {
        let low_bits = count.min(32);
        let low = u64::from(self.word() >> (32 - low_bits));
        if count <= 32 { low } else { low | u64::from(self.word() >> (64 - count)) << 32 }
    }

    fn word(&mut self) -> u32 {
        if self.next == SIZE {
            self.refill();
        }
        let mut y = self.state[self.next];
        self.next += 1;
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c_5680;
        y ^= (y << 15) & 0xefc6_0000;
        y ^ (y >> 18)
    }

    fn refill(&mut self) {
        for i in 0..SIZE {
            let y = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % SIZE] & 0x7fff_ffff);
            let odd = if y & 1 == 1 { 0x9908_b0df } else { 0 };
            self.state[i] = self.state[(i + 397) % SIZE] ^ (y >> 1) ^ odd;
        }
        self.next = 0;
    }
}

fn scramble(word: u32, factor: u32) -> u32 {
    (word ^ (word >> 30)).wrapping_mul(factor)
}

/// Steps through 1…623; at the end the last word is carried to the front.
fn next_index(state: &mut [u32; SIZE], i: usize) -> usize {
    if i + 1 < SIZE {
        return i + 1;
    }
    state[0] = state[SIZE - 1];
    1
}
