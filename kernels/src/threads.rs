//! A fork-join pool for kernels: a parallel region costs about a microsecond.
//!
//! A decoding step enters some hundred parallel regions of a few hundred microseconds each. A general work-stealing pool
//! puts its threads to sleep in between and pays a system call to wake them; here workers look for work for a while
//! before they sleep. Which thread runs which share is left open, so kernels must not let results depend on it.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long an idle worker keeps looking before it sleeps.
const PATIENCE: Duration = Duration::from_millis(2);
/// Looks at the job between two looks at the clock.
const LOOKS: usize = 64;
/// Elements that an operation of a few instructions on each has to have for other threads to be worth waking.
pub(crate) const WORTH_SHARING: usize = 1 << 14;
/// The same for dearer operations: an exponential and a division, or two passes, on each element.
pub(crate) const DEAR_WORTH_SHARING: usize = WORTH_SHARING / 4;
/// Looks at the last shares of a job before its caller lets other threads run.
const LOOKS_BEFORE_YIELD: usize = 2048;
/// Shares of one job at most: an index takes the low half of the state.
const CLOSED: u64 = u32::MAX as u64;

/// Runs `f(0) … f(shares − 1)`, some of them on other threads, and returns when all are done.
///
/// Called from inside a share, or while another thread is using the pool, it runs them one after the other.
pub(crate) fn run(shares: usize, f: impl Fn(usize) + Sync) {
    pool().run(shares, &f);
}

/// Calls `f(i, chunk i)` for all chunks of `chunk` elements of `data`, spread over the pool when `parallel`.
pub(crate) fn for_each_chunk(data: &mut [f32], chunk: usize, parallel: bool, f: impl Fn(usize, &mut [f32]) + Sync) {
    let chunks = data.len() / chunk.max(1);
    // A few shares per thread even out chunks of different cost.
    let shares = if parallel { (4 * count()).min(chunks) } else { 1 };
    if shares <= 1 {
        data.chunks_exact_mut(chunk.max(1)).enumerate().for_each(|(i, part)| f(i, part));
        return;
    }
    let per_share = chunks.div_ceil(shares);
    let pieces: Vec<Mutex<&mut [f32]>> = data.chunks_mut(per_share * chunk).map(Mutex::new).collect();
    run(pieces.len(), |share| {
        let mut piece = pieces[share].lock().unwrap_or_else(PoisonError::into_inner);
        for (i, part) in piece.chunks_exact_mut(chunk).enumerate() {
            f(share * per_share + i, part);
        }
    });
}

/// New memory for `count` rows of `cols`, each zeros until `f(i, row i)` has filled it, on the thread that fills it.
pub(crate) fn new_rows(count: usize, cols: usize, parallel: bool, f: impl Fn(usize, &mut [f32]) + Sync) -> Vec<f32> {
    let mut rows = Vec::with_capacity(count * cols);
    let out = Shared::new(rows.as_mut_ptr());
    let shares = if parallel { (4 * self::count()).min(count) } else { 1 };
    run(shares, |share| {
        for i in count * share / shares..count * (share + 1) / shares {
            // SAFETY: the row lies inside the memory and this share alone has it.
            f(i, unsafe { out.zeros(i * cols, cols) });
        }
    });
    // SAFETY: every row has been written.
    unsafe { rows.set_len(count * cols) };
    rows
}

/// Memory that the shares of one job write disjoint parts of.
pub(crate) struct Shared<T>(*mut T);

// SAFETY: the methods ask their callers for disjoint parts, and the elements may be written by any thread.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T: Copy> Shared<T> {
    /// The memory from `first` on; it need not be initialised.
    pub(crate) fn new(first: *mut T) -> Self {
        Self(first)
    }

    /// Writes values from element `at` on.
    ///
    /// # Safety
    /// They lie inside the memory, and nothing else reads or writes them at the same time.
    pub(crate) unsafe fn write(&self, at: usize, values: &[T]) {
        // SAFETY: promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0.add(at), values.len()) };
    }

    /// As [`Self::write`], for a number of values that is known when compiling.
    ///
    /// # Safety
    /// As there.
    #[inline]
    pub(crate) unsafe fn write_array<const N: usize>(&self, at: usize, values: &[T; N]) {
        // SAFETY: promised by the caller.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0.add(at), N) };
    }

    /// `len` elements from `at` on, set to zero bytes.
    ///
    /// # Safety
    /// They lie inside the memory, nothing else reads or writes them while the slice lives, and zero bytes are a value.
    pub(crate) unsafe fn zeros<'a>(&self, at: usize, len: usize) -> &'a mut [T] {
        // SAFETY: promised by the caller.
        unsafe {
            self.0.add(at).write_bytes(0, len);
            self.part(at, len)
        }
    }

    /// `len` elements from `at` on.
    ///
    /// # Safety
    /// They are initialised and lie inside the memory, and nothing else reads or writes them while the slice lives.
    pub(crate) unsafe fn part<'a>(&self, at: usize, len: usize) -> &'a mut [T] {
        // SAFETY: promised by the caller.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(at), len) }
    }
}

/// Threads that work on a job, the caller included.
pub(crate) fn count() -> usize {
    pool().workers + 1
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<&'static Pool> = OnceLock::new();
    POOL.get_or_init(|| Pool::start(rayon::current_num_threads() - 1))
}

struct Pool {
    workers: usize,
    /// Held by the thread whose job is being run.
    owner: Mutex<()>,
    /// Number of the job in the high half, next share in the low half; [`CLOSED`] while there is none to take.
    state: AtomicU64,
    shares: AtomicUsize,
    /// Address of the caller's `&dyn Fn(usize)`, valid while the job has shares that are not finished.
    call: AtomicPtr<()>,
    finished: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleeping: AtomicUsize,
    bed: Mutex<()>,
    alarm: Condvar,
}

type Call<'a> = &'a (dyn Fn(usize) + Sync);

impl Pool {
    fn start(workers: usize) -> &'static Self {
        let pool: &'static Self = Box::leak(Box::new(Self {
            workers,
            owner: Mutex::new(()),
            state: AtomicU64::new(CLOSED),
            shares: AtomicUsize::new(0),
            call: AtomicPtr::new(std::ptr::null_mut()),
            finished: AtomicUsize::new(0),
            panic: Mutex::new(None),
            sleeping: AtomicUsize::new(0),
            bed: Mutex::new(()),
            alarm: Condvar::new(),
        }));
        for _ in 0..workers {
            // A worker that cannot be started is one fewer: shares go to whoever asks.
            let _ = std::thread::Builder::new().name("deepspec-kernel".into()).spawn(|| pool.work());
        }
        pool
    }

    fn run(&self, shares: usize, f: Call<'_>) {
        let owner = match self.owner.try_lock() {
            Ok(owner) => Some(owner),
            // A job that panicked has ended all the same.
            Err(TryLockError::Poisoned(owner)) => Some(owner.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let Some(_owner) = owner.filter(|_| shares > 1 && self.workers > 0) else {
            (0..shares).for_each(f);
            return;
        };
        assert!((shares as u64) < CLOSED, "a job of {shares} shares");
        let job = self.state.load(Ordering::Relaxed) >> 32;
        self.call.store((&raw const f).cast_mut().cast(), Ordering::Relaxed);
        self.shares.store(shares, Ordering::Relaxed);
        self.finished.store(0, Ordering::Relaxed);
        self.state.store((job + 1) << 32, Ordering::SeqCst);
        if self.sleeping.load(Ordering::SeqCst) > 0 {
            let _bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
            self.alarm.notify_all();
        }
        while self.share() {}
        let mut looks = 0;
        while self.finished.load(Ordering::Acquire) < shares {
            looks += 1;
            if looks < LOOKS_BEFORE_YIELD {
                std::hint::spin_loop();
            } else {
                // On a busy machine the thread that has the last share may be waiting for this one's processor.
                std::thread::yield_now();
            }
        }
        if let Some(panic) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }

    /// Takes and runs one share; false when there is none.
    fn share(&self) -> bool {
        let state = self.state.load(Ordering::Acquire);
        let index = state & CLOSED;
        if index == CLOSED {
            return false;
        }
        let (shares, call) = (self.shares.load(Ordering::Relaxed), self.call.load(Ordering::Relaxed));
        // Taking the last share closes the job, so that its fields can be rewritten when all shares are finished.
        let next = if index as usize + 1 >= shares { state | CLOSED } else { state + 1 };
        // Success means that the state, and with it the job that the fields belong to, has not changed since it was read.
        if self.state.compare_exchange(state, next, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return true;
        }
        // SAFETY: the share was taken, so the job is not finished and its caller keeps the function alive.
        let f = unsafe { *call.cast::<Call<'_>>() };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| f(index as usize))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
        }
        self.finished.fetch_add(1, Ordering::Release);
        true
    }

    fn work(&self) {
        loop {
            let mut idle_since = Instant::now();
            while idle_since.elapsed() < PATIENCE {
                for _ in 0..LOOKS {
                    if self.share() {
                        while self.share() {}
                        idle_since = Instant::now();
                        break;
                    }
                    std::hint::spin_loop();
                }
            }
            let mut bed = self.bed.lock().unwrap_or_else(PoisonError::into_inner);
            self.sleeping.fetch_add(1, Ordering::SeqCst);
            while self.state.load(Ordering::SeqCst) & CLOSED == CLOSED {
                bed = self.alarm.wait(bed).unwrap_or_else(PoisonError::into_inner);
            }
            self.sleeping.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_share_runs_once_whatever_the_pool() {
        for workers in [0, 1, 3] {
            let pool = Pool::start(workers);
            for round in 0..2000 {
                let shares = round % 9;
                let counts: Vec<AtomicUsize> = (0..shares).map(|_| AtomicUsize::new(0)).collect();
                pool.run(shares, &|i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1), "{workers} workers, round {round}");
            }
        }
    }

    #[test]
    fn sleeping_workers_wake_and_nested_or_concurrent_jobs_run() {
        let pool = Pool::start(2);
        std::thread::sleep(PATIENCE * 5);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(4, &|_| {
                            pool.run(3, &|_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.load(Ordering::Relaxed), 3 * 200 * 12);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::start(1);
        let caught = catch_unwind(AssertUnwindSafe(|| pool.run(4, &|i| assert!(i != 2, "share two"))));
        assert!(caught.is_err());
        // Still parallel: two shares that wait for each other end only if two threads run them.
        let met = std::sync::Barrier::new(2);
        pool.run(2, &|_| {
            met.wait();
        });
    }
}
