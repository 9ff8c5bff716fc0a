"""The papers behind the methods, cited by key."""

from dataclasses import dataclass

__all__ = ["BIBLIOGRAPHY", "Citation"]


@dataclass(frozen=True)
class Citation:
    """One paper."""

    authors: str
    title: str
    year: int
    venue: str
    url: str

    @property
    def text(self) -> str:
        """The citation in one line."""
        return f"{self.authors} ({self.year}). {self.title}. {self.venue}."

    def bibtex(self, key: str) -> str:
        """The BibTeX entry."""
        lines = [
            f"@inproceedings{{{key},",
            f"  author = {{{self.authors}}},",
            f"  title = {{{self.title}}},",
            f"  booktitle = {{{self.venue}}},",
            f"  year = {{{self.year}}},",
            f"  url = {{{self.url}}}",
            "}",
        ]
        return "\n".join(lines)


BIBLIOGRAPHY: dict[str, Citation] = {
    "dangelo2021repulsive": Citation(
        "D'Angelo, Francesco and Fortuin, Vincent",
        "Repulsive Deep Ensembles are Bayesian",
        2021,
        "Advances in Neural Information Processing Systems",
        "https://arxiv.org/abs/2106.11642",
    ),
    "lakshminarayanan2017simple": Citation(
        "Lakshminarayanan, Balaji and Pritzel, Alexander and Blundell, Charles",
        "Simple and Scalable Predictive Uncertainty Estimation using Deep Ensembles",
        2017,
        "Advances in Neural Information Processing Systems",
        "https://arxiv.org/abs/1612.01474",
    ),
    "liu2016stein": Citation(
        "Liu, Qiang and Wang, Dilin",
        "Stein Variational Gradient Descent: A General Purpose Bayesian Inference Algorithm",
        2016,
        "Advances in Neural Information Processing Systems",
        "https://arxiv.org/abs/1608.04471",
    ),
    "liu2019understanding": Citation(
        "Liu, Chang and Zhuo, Jingwei and Cheng, Pengyu and Zhang, Ruiyi and Zhu, Jun",
        "Understanding and Accelerating Particle-Based Variational Inference",
        2019,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/1807.01750",
    ),
    "wang2019function": Citation(
        "Wang, Ziyu and Ren, Tongzheng and Zhu, Jun and Zhang, Bo",
        "Function Space Particle Optimization for Bayesian Neural Networks",
        2019,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/1902.09754",
    ),
    "li2018gradient": Citation(
        "Li, Yingzhen and Turner, Richard E.",
        "Gradient Estimators for Implicit Models",
        2018,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/1705.07107",
    ),
    "shi2018spectral": Citation(
        "Shi, Jiaxin and Sun, Shengyang and Zhu, Jun",
        "A Spectral Approach to Gradient Estimation for Implicit Distributions",
        2018,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/1806.02925",
    ),
    "gorham2017measuring": Citation(
        "Gorham, Jackson and Mackey, Lester",
        "Measuring Sample Quality with Kernels",
        2017,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/1703.01717",
    ),
    "goodfellow2015explaining": Citation(
        "Goodfellow, Ian J. and Shlens, Jonathon and Szegedy, Christian",
        "Explaining and Harnessing Adversarial Examples",
        2015,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/1412.6572",
    ),
    "guo2017calibration": Citation(
        "Guo, Chuan and Pleiss, Geoff and Sun, Yu and Weinberger, Kilian Q.",
        "On Calibration of Modern Neural Networks",
        2017,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/1706.04599",
    ),
    "grimit2006crps": Citation(
        "Grimit, Eric P. and Gneiting, Tilmann and Berrocal, Veronica J. and Johnson, Nicholas A.",
        "The Continuous Ranked Probability Score for Circular Variables and its Application to "
        "Mesoscale Forecast Ensemble Verification",
        2006,
        "Quarterly Journal of the Royal Meteorological Society",
        "https://doi.org/10.1256/qj.05.235",
    ),
    "nixon2019measuring": Citation(
        "Nixon, Jeremy and Dusenberry, Mike and Jerfel, Ghassen and Nguyen, Timothy and "
        "Liu, Jeremiah and Zhang, Linchuan and Tran, Dustin",
        "Measuring Calibration in Deep Learning",
        2019,
        "CVPR Workshops",
        "https://arxiv.org/abs/1904.01685",
    ),
    "friedman2023vendi": Citation(
        "Friedman, Dan and Dieng, Adji Bousso",
        "The Vendi Score: A Diversity Evaluation Metric for Machine Learning",
        2023,
        "Transactions on Machine Learning Research",
        "https://arxiv.org/abs/2210.02410",
    ),
    "fort2019deep": Citation(
        "Fort, Stanislav and Hu, Huiyi and Lakshminarayanan, Balaji",
        "Deep Ensembles: A Loss Landscape Perspective",
        2019,
        "arXiv",
        "https://arxiv.org/abs/1912.02757",
    ),
    "he2016identity": Citation(
        "He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian",
        "Identity Mappings in Deep Residual Networks",
        2016,
        "European Conference on Computer Vision",
        "https://arxiv.org/abs/1603.05027",
    ),
    "zagoruyko2016wide": Citation(
        "Zagoruyko, Sergey and Komodakis, Nikos",
        "Wide Residual Networks",
        2016,
        "British Machine Vision Conference",
        "https://arxiv.org/abs/1605.07146",
    ),
    "fort2019large": Citation(
        "Fort, Stanislav and Jastrzebski, Stanislaw",
        "Large Scale Structure of Neural Network Loss Landscapes",
        2019,
        "Advances in Neural Information Processing Systems",
        "https://arxiv.org/abs/1906.04724",
    ),
    "garipov2018loss": Citation(
        "Garipov, Timur and Izmailov, Pavel and Podoprikhin, Dmitrii and Vetrov, Dmitry and "
        "Wilson, Andrew Gordon",
        "Loss Surfaces, Mode Connectivity, and Fast Ensembling of DNNs",
        2018,
        "Advances in Neural Information Processing Systems",
        "https://arxiv.org/abs/1802.10026",
    ),
    "maddox2019simple": Citation(
        "Maddox, Wesley J. and Garipov, Timur and Izmailov, Pavel and Vetrov, Dmitry and "
        "Wilson, Andrew Gordon",
        "A Simple Baseline for Bayesian Uncertainty in Deep Learning",
        2019,
        "Advances in Neural Information Processing Systems",
        "https://arxiv.org/abs/1902.02476",
    ),
    "gal2016dropout": Citation(
        "Gal, Yarin and Ghahramani, Zoubin",
        "Dropout as a Bayesian Approximation: Representing Model Uncertainty in Deep Learning",
        2016,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/1506.02142",
    ),
    "ainsworth2022git": Citation(
        "Ainsworth, Samuel K. and Hayase, Jonathan and Srinivasa, Siddhartha",
        "Git Re-Basin: Merging Models modulo Permutation Symmetries",
        2022,
        "arXiv",
        "https://arxiv.org/abs/2209.04836",
    ),
    "he2016deep": Citation(
        "He, Kaiming and Zhang, Xiangyu and Ren, Shaoqing and Sun, Jian",
        "Deep Residual Learning for Image Recognition",
        2016,
        "Conference on Computer Vision and Pattern Recognition",
        "https://arxiv.org/abs/1512.03385",
    ),
    "trinh2024input": Citation(
        "Trinh, Trung and Heinonen, Markus and Acerbi, Luigi and Kaski, Samuel",
        "Input-gradient Space Particle Inference for Neural Network Ensembles",
        2024,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/2306.02775",
    ),
    "steger2024function": Citation(
        "Steger, Sophie and Knoll, Christian and Klein, Bernhard and Fröning, Holger and "
        "Pernkopf, Franz",
        "Function Space Diversity for Uncertainty Prediction via Repulsive Last-Layer Ensembles",
        2024,
        "arXiv",
        "https://arxiv.org/abs/2412.15758",
    ),
    "zhang2018mixup": Citation(
        "Zhang, Hongyi and Cissé, Moustapha and Dauphin, Yann N. and Lopez-Paz, David",
        "mixup: Beyond Empirical Risk Minimization",
        2018,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/1710.09412",
    ),
    "selvaraju2017grad": Citation(
        "Selvaraju, Ramprasaath R. and Cogswell, Michael and Das, Abhishek and "
        "Vedantam, Ramakrishna and Parikh, Devi and Batra, Dhruv",
        "Grad-CAM: Visual Explanations from Deep Networks via Gradient-based Localization",
        2017,
        "International Conference on Computer Vision",
        "https://arxiv.org/abs/1610.02391",
    ),
    "neal2003slice": Citation(
        "Neal, Radford M.",
        "Slice Sampling",
        2003,
        "The Annals of Statistics",
        "https://projecteuclid.org/euclid.aos/1056562461",
    ),
    "lecun1998gradient": Citation(
        "LeCun, Yann and Bottou, Leon and Bengio, Yoshua and Haffner, Patrick",
        "Gradient-Based Learning Applied to Document Recognition",
        1998,
        "Proceedings of the IEEE",
        "https://doi.org/10.1109/5.726791",
    ),
    "xiao2017fashion": Citation(
        "Xiao, Han and Rasul, Kashif and Vollgraf, Roland",
        "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms",
        2017,
        "arXiv",
        "https://arxiv.org/abs/1708.07747",
    ),
    "clanuwat2018deep": Citation(
        "Clanuwat, Tarin and Bober-Irizar, Mikel and Kitamoto, Asanobu and Lamb, Alex and "
        "Yamamoto, Kazuaki and Ha, David",
        "Deep Learning for Classical Japanese Literature",
        2018,
        "arXiv",
        "https://arxiv.org/abs/1812.01718",
    ),
    "bulatov2011notmnist": Citation(
        "Bulatov, Yaroslav",
        "notMNIST Dataset",
        2011,
        "Machine Learning, etc.",
        "http://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html",
    ),
    "krizhevsky2009learning": Citation(
        "Krizhevsky, Alex",
        "Learning Multiple Layers of Features from Tiny Images",
        2009,
        "University of Toronto",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
    ),
    "netzer2011reading": Citation(
        "Netzer, Yuval and Wang, Tao and Coates, Adam and Bissacco, Alessandro and Wu, Bo and "
        "Ng, Andrew Y.",
        "Reading Digits in Natural Images with Unsupervised Feature Learning",
        2011,
        "NIPS Workshop on Deep Learning and Unsupervised Feature Learning",
        "http://ufldl.stanford.edu/housenumbers/",
    ),
    "hernandez2015probabilistic": Citation(
        "Hernandez-Lobato, Jose Miguel and Adams, Ryan P.",
        "Probabilistic Backpropagation for Scalable Learning of Bayesian Neural Networks",
        2015,
        "International Conference on Machine Learning",
        "https://arxiv.org/abs/1502.05336",
    ),
    "hendrycks2019benchmarking": Citation(
        "Hendrycks, Dan and Dietterich, Thomas",
        "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
        2019,
        "International Conference on Learning Representations",
        "https://arxiv.org/abs/1903.12261",
    ),
    "loaizaganem2025deep": Citation(
        "Loaiza-Ganem, Gabriel and Villecroze, Valentin and Wang, Yixin",
        "Deep Ensembles Secretly Perform Empirical Bayes",
        2025,
        "arXiv",
        "https://arxiv.org/abs/2501.17917",
    ),
    "yao2018stacking": Citation(
        "Yao, Yuling and Vehtari, Aki and Simpson, Daniel and Gelman, Andrew",
        "Using Stacking to Average Bayesian Predictive Distributions",
        2018,
        "Bayesian Analysis",
        "https://arxiv.org/abs/1704.02030",
    ),
    "mccullagh1980regression": Citation(
        "McCullagh, Peter",
        "Regression Models for Ordinal Data",
        1980,
        "Journal of the Royal Statistical Society B",
        "https://doi.org/10.1111/j.2517-6161.1980.tb01109.x",
    ),
    "lange1989robust": Citation(
        "Lange, Kenneth L. and Little, Roderick J. A. and Taylor, Jeremy M. G.",
        "Robust Statistical Modeling Using the t Distribution",
        1989,
        "Journal of the American Statistical Association",
        "https://doi.org/10.1080/01621459.1989.10478852",
    ),
    "bishop1994mixture": Citation(
        "Bishop, Christopher M.",
        "Mixture Density Networks",
        1994,
        "Aston University, Neural Computing Research Group Report NCRG/94/004",
        "https://publications.aston.ac.uk/id/eprint/373/",
    ),
    "hilbe2011negative": Citation(
        "Hilbe, Joseph M.",
        "Negative Binomial Regression",
        2011,
        "Cambridge University Press",
        "https://doi.org/10.1017/CBO9780511973420",
    ),
}
